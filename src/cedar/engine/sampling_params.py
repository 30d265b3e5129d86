"""`SamplingParams`: how one request is sampled; OpenAI and vLLM names, validated on creation.

Stop strings are carried here but applied where text exists (`cedar.llm`, the server). No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cedar.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request.

    Attributes:
        n: completions per prompt.
        max_tokens: new tokens at most.   min_tokens: before this many, no end-of-sequence or stop
            token can be drawn.
        temperature: 0 = greedy.   top_p, top_k (0 = off), min_p: which tokens stay in the draw.
        seed: makes the draw repeatable; None = a different one every time.
        stop: strings that end the text (not part of it).   stop_token_ids: ids that end it. None
            means none, also for `logit_bias`.
        ignore_eos: go on after the end-of-sequence token.
        presence_penalty, frequency_penalty, repetition_penalty: as in OpenAI / vLLM.
        logit_bias: token id -> added to its logit.
        logprobs: number of most likely tokens reported per position; None = off.
        prompt_logprobs: the same for prompt positions; needs the decoder on every prompt row.
    """

    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, default in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _several("stop", self.stop, "a string or a list of strings")
        _several("stop_token_ids", self.stop_token_ids, "a list of token ids")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias={self.logit_bias!r}; allowed is a dict of token id -> number, or None",
                param="logit_bias",
            )
        _whole("n", self.n, 1, 128)
        _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _whole("top_k", self.top_k, 0, None, also="0 = off")
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias key", token, 0, None)
            _real(f"logit_bias[{token}]", bias, -100.0, 100.0)
        for token in self.stop_token_ids:
            _whole("stop_token_ids entry", token, 0, None)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(
                f"stop={list(self.stop)!r}: every entry must be a non-empty string", param="stop"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits of the next."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )


def _whole(name: str, value: object, low: int, high: int | None, also: str = "") -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not ok or (high is not None and isinstance(value, int) and value > high):
        bound = f"{low}.." if high is None else f"{low}..{high}"
        note = f" ({also})" if also else ""
        raise RequestError(f"{name}={value!r}; allowed are integers {bound}{note}", param=name)


def _several(name: str, value: object, allowed: str) -> None:
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, bytearray, Mapping)):
        raise RequestError(f"{name}={value!r}; allowed is {allowed}, or None", param=name)


def _real(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(
            f"{name}={value!r}; allowed are numbers in {bracket}{low}, {high}]", param=name
        )
