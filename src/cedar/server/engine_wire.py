"""What goes over the pipes between the server and its engine process. No torch.

Events carry live requests; here is the part of them that the other side needs. A token is a short
tuple, since one passes per token and stream.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cedar.engine.engine_status import EngineCounts, EngineDetails, EngineInfo
from cedar.engine.host import Answered, Ended, Refused
from cedar.engine.output import Logprob, StepOutput
from cedar.engine.request import FinishReason, Request

if TYPE_CHECKING:
    from cedar.llm import LLM

_LENGTH = struct.Struct("<Q")

#: Fields of a request that the engine sets and the server reads.
_NEWS = (
    "started", "first_token", "matched_tokens", "cached_tokens", "disk_tokens", "disk_seconds",
    "replayed_tokens", "miss_reason", "preemptions", "prompt_logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class EngineSpec:
    """How an engine is built.

    Attributes:
        model, kernels, dtype, index_key_rule, seed: as `LLM`.   engine: fields of `EngineConfig`.
    """

    model: str
    engine: dict[str, Any]
    kernels: str = "auto"
    dtype: str | None = None
    index_key_rule: str = "corrected"
    seed: int = 0

    def build(self) -> LLM:
        """Load the model. Raises as `LLM`."""
        from cedar.llm import LLM  # torch, which the server's own process does without

        return LLM(
            self.model, kernels=self.kernels, dtype=self.dtype, seed=self.seed,
            index_key_rule=self.index_key_rule,  # type: ignore[arg-type]
            **self.engine,
        )  # fmt: skip


@dataclass(frozen=True)
class Ready:
    """First message of the engine process: it will obey."""

    info: EngineInfo
    counts: EngineCounts
    details: EngineDetails


class Token(NamedTuple):
    """A `StepOutput`; `news` are the request's `_NEWS`, with its first output and its last."""

    request_id: str
    token_id: int | None
    logprobs: tuple[Logprob, ...] | None
    finish_reason: FinishReason | None
    news: tuple[Any, ...] | None


class Message(NamedTuple):
    """An event (no tokens: none), the counts now, and the details unless they are as before."""

    event: list[Token] | Refused | Answered | Ended
    counts: EngineCounts
    details: EngineDetails | None


def pack(message: object) -> bytes:
    """A message as bytes, its length first."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


class Unpacker:
    """Messages from the pieces in which their bytes arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[Any]:
        """Take a piece; the messages that are complete now."""
        self._bytes += piece
        messages, at = [], 0
        while len(self._bytes) >= at + _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(self._bytes, at)[0]
            if len(self._bytes) < end:
                break
            messages.append(pickle.loads(self._bytes[at + _LENGTH.size : end]))
            at = end
        del self._bytes[:at]
        return messages


def to_tokens(outputs: Sequence[StepOutput]) -> list[Token]:
    """Outputs of a step, ready to be sent."""
    tokens = []
    for output in outputs:
        request, reason = output.request, output.finish_reason
        tells = reason is not None or len(request.output_ids) == 1
        news = tuple(getattr(request, name) for name in _NEWS) if tells else None
        tokens.append(Token(request.request_id, output.token_id, output.logprobs, reason, news))
    return tokens


def to_outputs(tokens: Sequence[Token], requests: Mapping[str, Request]) -> list[StepOutput]:
    """Outputs as they were sent, with the requests of this side; unknown requests are left out."""
    outputs = []
    for token in tokens:
        request = requests.get(token.request_id)
        if request is None:
            continue  # its client has left
        if token.news is not None:
            for name, value in zip(_NEWS, token.news, strict=True):
                setattr(request, name, value)
        outputs.append(StepOutput(request, token.token_id, token.logprobs, token.finish_reason))
    return outputs
