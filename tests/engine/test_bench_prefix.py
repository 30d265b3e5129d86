"""`cedar bench prefix` measures what it says: hits of whole blocks, and files of a conversation."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cedar.bench import prefix
from cedar.bench.prefix import conversation_bytes, run_prefix
from cedar.config.presets import preset
from cedar.engine.engine import Engine
from cedar.kernels.backends import select_operators
from cedar.loading import from_config


def quiet(_: str) -> None:
    """Progress that nobody reads."""


def test_a_prompt_is_timed_cold_from_disk_and_from_memory(tmp_path: Path) -> None:
    model = from_config(preset("tiny"), ops=select_operators("auto"))
    times = run_prefix(model, tmp_path / "store", tokens=300, rounds=5, progress=quiet)
    document = times.to_dict()
    assert (times.cached_tokens, times.replayed_tokens) == (256, 8)
    assert times.read_bytes == 256 * model.new_state(1).formats.kv_bytes(model.plan, 2) // 2
    for tier in ("disk", "memory"):
        low, high = document[tier]["over_cold_quartiles"]
        assert 0 < low <= document[tier]["over_cold"] <= high
        assert document[tier]["seconds"] > 0


def test_a_conversation_takes_more_bytes_with_windows_and_most_without_sharing(
    tmp_path: Path,
) -> None:
    result = conversation_bytes(
        preset("tiny-article"), select_operators("auto"), tmp_path, turns=3, turn_tokens=300,
        answer_tokens=20, progress=quiet,
    )  # fmt: skip
    assert result.tokens == 900
    assert result.rows < result.with_windows < result.baseline
    assert result.to_dict()["over_baseline"] == result.rows / result.baseline


def test_reading_an_answer_takes_the_bytes_that_generating_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(preset("tiny-article"), sliding_window=16)
    sizes = {"turns": 3, "turn_tokens": 600, "answer_tokens": 150}
    read, generated = tmp_path / "read", tmp_path / "generated"
    told = conversation_bytes(config, select_operators("auto"), read, **sizes, progress=quiet)
    converse = prefix._converse

    def generate(
        engine: Engine, turns: int, each: int, answer: int, _: object
    ) -> Iterator[list[int]]:
        answers: Sequence[list[int]] = []
        return converse(engine, turns, each, answer, answers)

    monkeypatch.setattr(prefix, "_converse", generate)
    again = conversation_bytes(config, select_operators("auto"), generated, **sizes, progress=quiet)
    assert told == again


def test_a_benchmark_that_is_told_to_end_leaves_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cedar", "bench", "prefix", "--preset", "tiny",
               "--tokens", "4000", "--directory", str(tmp_path)]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "cold prefill" in process.stderr.readline()
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    assert not list(tmp_path.iterdir())
