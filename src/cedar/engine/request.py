"""`Request`: one completion from arrival to finish, as token ids. No torch.

Owned by the scheduler; the runner appends tokens, the engine reports them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from cedar.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cedar.cache.window_cache import Windows
    from cedar.engine.output import Logprob


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's, plus abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(eq=False)
class Request:
    """One completion.

    Attributes:
        request_id: unique in the engine.
        prompt_ids: the prompt.   params: sampling.
        eos_token_id: ends the text unless ignored; None = there is none.
        index: number of this completion among the `n` of its prompt.
        output_ids: sampled so far.
        status, finish_reason, stop_token: as they are; `stop_token` is the id that ended it.
        slot: state slot while running.   block_ids: blocks of the pool while running.
        read: prompt tokens already encoded in this run.
        redone: output tokens fed back into the model; behind the sampled ones by one while running,
            and by more after a preemption, when they are fed again.
        preemptions: how often it lost its blocks.
        cache_salt: separates tenants in the prefix cache.
        matched_tokens, cached_tokens: prompt tokens found in the prefix cache, and taken from it.
        disk_tokens: of the matched ones, those read from disk, in `disk_seconds`.
        replayed_tokens: of those taken, the ones that run through the encoder again.
        miss_reason: why nothing was taken; None after a hit.
        depth: bounded replays that the rows computed by this request descend from.
        keys: chain keys of the full blocks known so far.
        published: leading blocks that have been made findable.
        is_placed: whether its slot has been set up since it was admitted.
        window_stops: prompt positions whose windows will be kept, ascending; a chunk ends at each.
        windows: windows by position, until they are handed over to be kept.
        restored_windows: windows at `read`, until the slot is set up; None = none were kept.
        prompt_logprobs: entries of each prompt token read so far, when asked for; None for the
            first token, which nothing predicts.
        arrival, started, first_token, finished_at: monotonic seconds.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    eos_token_id: int | None = None
    index: int = 0
    output_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    slot: int | None = None
    block_ids: list[int] = field(default_factory=list)
    read: int = 0
    redone: int = 0
    preemptions: int = 0
    cache_salt: bytes = b""
    matched_tokens: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0
    disk_seconds: float = 0.0
    replayed_tokens: int = 0
    miss_reason: str | None = None
    depth: int = 0
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    is_placed: bool = False
    window_stops: tuple[int, ...] = ()
    windows: dict[int, Windows] = field(default_factory=dict)
    restored_windows: Windows | None = None
    prompt_logprobs: list[tuple[Logprob, ...] | None] = field(default_factory=list)
    arrival: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    finished_at: float | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt row must run through the decoder, whatever the engine's mode."""
        return self.params.prompt_logprobs is not None

    @property
    def cached_from_disk(self) -> int:
        """Of the tokens taken from the prefix cache, those whose rows came from disk."""
        return min(self.disk_tokens, self.cached_tokens)

    @property
    def length(self) -> int:
        """Tokens the state holds now: prompt tokens read plus output tokens fed back."""
        return self.read + self.redone

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output together."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def next_token(self) -> int:
        """Output token to feed in the next decode step."""
        return self.output_ids[self.redone]

    @property
    def end_ids(self) -> list[int]:
        """Ids that end the text."""
        ids = list(self.params.stop_token_ids)
        if self.eos_token_id is not None and not self.params.ignore_eos:
            ids.append(self.eos_token_id)
        return ids

    def append(self, token: int) -> None:
        """Take a sampled token; finish on an end id or at `max_tokens`."""
        self.output_ids.append(token)
        if self.first_token is None:
            self.first_token = time.monotonic()
        if len(self.output_ids) > self.params.min_tokens and token in self.end_ids:
            self.stop_token = token
            self.finish(FinishReason.STOP)
        elif len(self.output_ids) >= self.params.max_tokens:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason) -> None:
        """Mark as ended."""
        self.status, self.finish_reason = RequestStatus.FINISHED, reason
        self.finished_at = time.monotonic()

    def rewind(self) -> None:
        """Forget what the state held; sampled tokens are kept and will be fed again."""
        self.status = RequestStatus.WAITING
        self.slot, self.block_ids = None, []
        self.read = self.redone = self.published = 0
        self.is_placed = False
        self.windows, self.restored_windows = {}, None
