"""Scaling benchmark: how time and memory grow with the context, on `nano` geometry.

Called by `cedar bench scaling`: decode steps at growing contexts, scratch memory of prefill, and one
long prefill.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cedar.bench.memory import PeakMemory
from cedar.bench.offline import random_prompt
from cedar.engine.loaded_model import LoadedModel

_STEPS = 30


def decode_scaling(
    model: LoadedModel, contexts: Sequence[int], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Median decode step at each context, all contexts measured in turn after one growing prefill.

    Args:
        contexts: ascending.
    """
    states = []
    for context in contexts:
        progress(f"prefill of {context:,} tokens")
        state = model.new_state(context + 4 * _STEPS)
        begin = time.perf_counter()
        model.prefill(
            random_prompt(context, model.config.vocab_size), state, decoder_prefill="report"
        )
        states.append((context, state, time.perf_counter() - begin))
    token = torch.tensor([5])
    times: dict[int, list[float]] = {context: [] for context in contexts}
    for number in range(_STEPS):
        for context, state, _ in states:
            begin = time.perf_counter()
            model.step(token, state)
            if number >= 3:
                times[context].append(time.perf_counter() - begin)
    first = statistics.median(times[contexts[0]])
    return [
        {
            "context": context,
            "step_seconds": statistics.median(times[context]),
            "over_first": statistics.median(times[context]) / first,
            "prefill_seconds": seconds,
            "prefill_tokens_per_second": context / seconds,
            "kv_bytes": state.kv_bytes(),
        }
        for context, state, seconds in states
    ]


def prefill_scratch(
    model: LoadedModel, lengths: Sequence[int], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Peak memory of a prefill beyond its state, at each length; the state is touched beforehand."""
    # Not measured: what the first prefill of a process sets up for good.
    model.prefill(random_prompt(lengths[0], model.config.vocab_size), model.new_state(lengths[0]))
    results = []
    for length in lengths:
        progress(f"scratch of a {length:,} token prefill")
        prompt = random_prompt(length, model.config.vocab_size)
        state = model.new_state(length)
        for buffer in (*state.pool.main.values(), *state.pool.index.values()):
            buffer.fill_(0)
        with PeakMemory() as memory:
            model.prefill(prompt, state, decoder_prefill="report")
        results.append(
            {
                "length": length,
                "peak_scratch_bytes": memory.peak_bytes,
                "state_bytes": state.pool.nbytes,
            }
        )
    return results


def long_prefill(
    model: LoadedModel, length: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """One prefill of `length` tokens and a few decode steps after it."""
    state = model.new_state(length + _STEPS)
    prompt = random_prompt(length, model.config.vocab_size)
    begin = time.perf_counter()

    def report(done: int) -> None:
        if done % (64 * 1024) < 2048:
            rate = done / (time.perf_counter() - begin)
            progress(f"{done:,} of {length:,} tokens, {rate:,.0f} tokens/s")

    with PeakMemory() as memory:
        model.prefill(prompt, state, decoder_prefill="report", progress=report)
        seconds = time.perf_counter() - begin
        steps = []
        for _ in range(_STEPS):
            begin = time.perf_counter()
            model.step(torch.tensor([5]), state)
            steps.append(time.perf_counter() - begin)
    return {
        "length": length,
        "prefill_seconds": seconds,
        "tokens_per_second": length / seconds,
        "step_seconds": statistics.median(steps),
        "kv_bytes": state.kv_bytes(),
        "peak_bytes": memory.peak_bytes,
    }
