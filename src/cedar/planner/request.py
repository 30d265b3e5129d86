"""What is asked of the planner: a request, a flow and the modes it runs in. Validated, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from cedar.config.flows import FLOWS, Flow
from cedar.config.model_config import ModelConfig
from cedar.config.modes import DecoderPrefill, EncoderReplay
from cedar.errors import RequestError, UsageError

__all__ = ["DECODER_PREFILL", "ENCODER_REPLAY", "FLOWS", "INPUT_TOKENS", "OUTPUT_TOKENS",
           "DecoderPrefill", "EncoderReplay", "Flow", "Request", "default_sizes",
           "flow_switches"]  # fmt: skip

#: The article's request.
INPUT_TOKENS, OUTPUT_TOKENS = 30_000, 1_000

DECODER_PREFILL: tuple[DecoderPrefill, ...] = get_args(DecoderPrefill)

ENCODER_REPLAY: tuple[EncoderReplay, ...] = get_args(EncoderReplay)


def flow_switches(flow: str) -> tuple[bool, bool]:
    """(ced, csa2) of a flow's name.

    Raises:
        UsageError: the name is unknown; the message lists the four.
    """
    for name, switches in FLOWS.items():
        if name == flow:
            return switches
    raise UsageError(f"unknown flow {flow!r}; allowed: {', '.join(FLOWS)}")


def default_sizes(
    config: ModelConfig, input_tokens: int | None, output_tokens: int | None
) -> tuple[int, int]:
    """Input and output tokens; one that is None becomes the article's, or what the context allows."""
    limit = config.max_position_embeddings
    if output_tokens is None:
        room = limit // 2 if input_tokens is None else limit - input_tokens
        output_tokens = _default(OUTPUT_TOKENS, room)
    if input_tokens is None:
        input_tokens = _default(INPUT_TOKENS, limit - output_tokens)
    return input_tokens, output_tokens


def _default(tokens: int, room: int) -> int:
    """The default, or what there is room for; where there is none, `Request.check` refuses it."""
    return min(tokens, room) if room > 0 else tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, how many of it run at once, and the modes it runs in.

    Attributes:
        input_tokens, output_tokens: prompt and generated tokens, at least 1 each.
        concurrency: sequences of this size alive at once.
        hit_rate: share of the prompt found in the prefix cache; rounded down to whole blocks.
        block_size: tokens in one block (page) of the KV pool.
        max_num_batched_tokens: prefill chunk.
        tokens_per_turn: tokens between two boundaries at which a window-storing cache would persist
            windows (the end of a prompt or of an answer).
        decoder_prefill: how much of the decoder prefill runs under CED.
        replay_windows: tail of the prompt that `report` and `cut` replay, in windows.
        encoder_replay, encoder_replay_windows: how windows are rebuilt after a prefix hit.
    """

    input_tokens: int
    output_tokens: int
    concurrency: int = 1
    hit_rate: float = 0.0
    block_size: int = 128
    max_num_batched_tokens: int = 2048
    tokens_per_turn: int = 760
    decoder_prefill: DecoderPrefill = "report"
    replay_windows: int = 1
    encoder_replay: EncoderReplay = "bounded"
    encoder_replay_windows: int = 1

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "concurrency", "block_size",
                     "max_num_batched_tokens", "tokens_per_turn", "replay_windows",
                     "encoder_replay_windows"):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RequestError(
                    f"{name}={value!r} must be a whole number, at least 1", param=name
                )
        if not 0 <= self.hit_rate <= 1:
            raise RequestError(
                f"hit_rate={self.hit_rate!r} must be between 0 and 1", param="hit_rate"
            )
        if self.decoder_prefill not in DECODER_PREFILL:
            raise RequestError(
                f"decoder_prefill={self.decoder_prefill!r}; allowed: {', '.join(DECODER_PREFILL)}",
                param="decoder_prefill",
            )
        if self.encoder_replay not in ENCODER_REPLAY:
            raise RequestError(
                f"encoder_replay={self.encoder_replay!r}; allowed: {', '.join(ENCODER_REPLAY)}",
                param="encoder_replay",
            )
        for windows, mode in (("replay_windows", self.decoder_prefill),
                              ("encoder_replay_windows", self.encoder_replay)):  # fmt: skip
            if getattr(self, windows) != 1 and mode in ("full", "exact"):
                raise RequestError(
                    f"{windows}={getattr(self, windows)} has no effect with mode {mode!r}; use "
                    f"it with a bounded replay",
                    param=windows,
                )

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens of one sequence."""
        return self.input_tokens + self.output_tokens

    def check(self, config: ModelConfig) -> None:
        """Refuse what this model cannot run.

        Raises:
            RequestError: longer than the model's context, or a block size that splits a group.
        """
        limit = config.max_position_embeddings
        if self.total_tokens > limit:
            raise RequestError(
                f"{self.input_tokens:,} input + {self.output_tokens:,} output tokens = "
                f"{self.total_tokens:,} exceed this model's context: allowed at most {limit:,} "
                f"(max_position_embeddings); ask for fewer input or output tokens",
                param="input_tokens",
            )
        step = config.plan.ratio_lcm
        if self.block_size % step:
            raise RequestError(
                f"block_size={self.block_size} must be a multiple of {step}, the least common "
                f"multiple of the compress ratios, so that no compression group spans two blocks",
                param="block_size",
            )
