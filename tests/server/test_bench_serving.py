"""`cedar bench serving` compares the same work: equal batches on both sides, every token counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_api import on_a_thread

from cedar.bench.serving import run_serving
from cedar.engine.engine import Engine

STREAMS, PROMPT, OUTPUT, ROUNDS = 3, 8, 5, 5


def test_server_and_offline_engine_run_the_same_batches(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    original = Engine.step

    def step(engine: Engine) -> Any:
        outputs = original(engine)
        batches.append(len(outputs))
        return outputs

    monkeypatch.setattr(Engine, "step", step)
    result = run_serving(
        str(tiny_directory), streams=STREAMS, prompt_tokens=PROMPT, output_tokens=OUTPUT,
        rounds=ROUNDS, start_host=on_a_thread,
    )  # fmt: skip
    assert batches == [STREAMS] * OUTPUT * 2 * (ROUNDS + 1)
    document = result.to_dict()
    assert document["rounds"] == ROUNDS and document["server_seconds"] > 0
    assert len(result.ttft) == STREAMS * ROUNDS
    assert 0 < document["inter_token_seconds"]["p50"] <= document["inter_token_seconds"]["p99"]
