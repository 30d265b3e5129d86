"""Offline benchmark: whole-model ratios on a thin 40-layer model, native against reference, CED against not.

Called by `cedar bench offline`. Everything that is compared runs in this process, turn by turn.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from cedar import LLM, SamplingParams
from cedar.bench.measure import Ratio, interleave
from cedar.config.flows import flow_config
from cedar.config.presets import preset
from cedar.engine.account import Account
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.phases import DecoderPrefill
from cedar.kernels.composed import ComposedOperators
from cedar.kernels.operators import Operators
from cedar.loading import from_config

#: Prompt of the decode comparison, and steps of one turn: a step alone, after a turn of the other side,
#: would find its weights and the interpreter's own data out of the caches.
_DECODE_CONTEXT = 2048
_DECODE_STEPS = 16


@dataclass(frozen=True)
class OfflineResult:
    """One line of the table; `ratio.speedup` is B / A."""

    name: str
    a: str
    b: str
    ratio: Ratio
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "a": self.a,
            "b": self.b,
            "note": self.note,
            **self.ratio.to_dict(),
        }


def random_prompt(tokens: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Int64 `[1, tokens]` of ordinary ids."""
    draw = random.Random(seed)
    return torch.tensor([[draw.randrange(3, vocab_size) for _ in range(tokens)]])


def run_offline(
    native: Operators, reference: Operators, *, preset_name: str, rounds: int
) -> Iterator[OfflineResult]:
    """All lines of the benchmark."""
    config = preset(preset_name)
    fast = from_config(config, ops=native)
    slow = from_config(config, ops=reference)
    yield _prefill(fast, slow, rounds)
    yield _decode(fast, slow, rounds)
    del slow
    yield _ced(native, preset_name, rounds)
    yield _concurrency(fast, rounds)


def _prefill(fast: LoadedModel, slow: LoadedModel, rounds: int) -> OfflineResult:
    ids = random_prompt(2048, fast.config.vocab_size)

    def run(model: LoadedModel) -> object:
        return model.prefill(ids, model.new_state(2048))

    ratio = interleave(lambda: run(fast), lambda: run(slow), rounds=rounds)
    note = f"{2048 / ratio.a_seconds:,.0f} tokens/s native"
    return OfflineResult("prefill 2,048 tokens, full decoder", "native", "reference", ratio, note)


def _decode(fast: LoadedModel, slow: LoadedModel, rounds: int) -> OfflineResult:
    ids = random_prompt(_DECODE_CONTEXT, fast.config.vocab_size)
    states = {}
    for model in (fast, slow):
        states[id(model)] = model.new_state(_DECODE_CONTEXT + 1024)
        model.prefill(ids, states[id(model)], decoder_prefill="report")
    token = torch.tensor([5])

    def run(model: LoadedModel) -> object:
        return [model.step(token, states[id(model)]) for _ in range(_DECODE_STEPS)]

    ratio = interleave(lambda: run(fast), lambda: run(slow), rounds=rounds)
    note = f"{ratio.a_seconds / _DECODE_STEPS * 1e3:.1f} ms a step native"
    name = f"{_DECODE_STEPS} steps, batch 1, {_DECODE_CONTEXT:,} context"
    return OfflineResult(name, "native", "reference", ratio, note)


def _ced(native: Operators, preset_name: str, rounds: int, tokens: int = 30_000) -> OfflineResult:
    """CED prefill against the same model without it, at the article's prompt length."""
    ids = random_prompt(tokens, preset(preset_name).vocab_size)
    with_ced = from_config(flow_config(preset(preset_name), "ced+csa2"), ops=native)
    without = from_config(flow_config(preset(preset_name), "csa2"), ops=native)

    def run(model: LoadedModel, mode: DecoderPrefill) -> object:
        return model.prefill(ids, model.new_state(tokens), decoder_prefill=mode)

    ratio = interleave(
        lambda: run(with_ced, "report"), lambda: run(without, "full"), rounds=max(5, rounds // 2)
    )
    note = f"CED / no CED = {1 / ratio.speedup:.3f}"
    return OfflineResult(f"prefill {tokens:,} tokens", "ced+csa2", "csa2", ratio, note)


def _concurrency(fast: LoadedModel, rounds: int) -> OfflineResult:
    """Tokens per second of eight requests together against one after another."""
    prompts = [random_prompt(64, fast.config.vocab_size, seed)[0].tolist() for seed in range(8)]
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)

    def run(count: int) -> object:
        llm = LLM(fast, max_num_seqs=count, max_model_len=128)
        return llm.generate(prompts, params)

    ratio = interleave(lambda: run(8), lambda: run(1), rounds=max(5, rounds // 2))
    note = f"{8 * 32 / ratio.a_seconds:,.0f} tokens/s with 8 at once"
    return OfflineResult("8 requests of 64 + 32 tokens", "8 at once", "1 at a time", ratio, note)


@dataclass(frozen=True)
class StepBreakdown:
    """Where a decode step's time goes, by operator."""

    milliseconds: float
    operators: dict[str, float]


class TimedOperators:
    """Wraps a backend and adds up the time of every operator; for `cedar bench offline` only.

    The chain of a whole layer runs as its parts: there would be nothing else to tell apart.
    """

    def __init__(self, inner: Operators) -> None:
        self._inner = inner
        self.name = inner.name
        self.seconds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "layer_step":
            return partial(ComposedOperators.layer_step, cast(ComposedOperators, self))
        operator = getattr(self._inner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = operator(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            return result

        return call


def step_breakdown(ops: Operators, preset_name: str, steps: int = 50) -> StepBreakdown:
    """Time of one decode step and of the operators in it; the rest is Python and torch glue."""
    timed = TimedOperators(ops)
    model = from_config(preset(preset_name), ops=timed)
    state = model.new_state(_DECODE_CONTEXT + steps + 8)
    ids = random_prompt(_DECODE_CONTEXT, model.config.vocab_size)
    model.prefill(ids, state, decoder_prefill="report")
    token, account = torch.tensor([5]), Account()
    for _ in range(5):
        model.step(token, state)
    timed.seconds.clear()
    begin = time.perf_counter()
    for _ in range(steps):
        model.step(token, state, account)
    total = (time.perf_counter() - begin) / steps
    operators = {name: value / steps * 1e3 for name, value in timed.seconds.items()}
    operators["python and torch glue"] = total * 1e3 - sum(operators.values())
    return StepBreakdown(total * 1e3, dict(sorted(operators.items(), key=lambda item: -item[1])))
