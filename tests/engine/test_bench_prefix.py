"""`cedar bench prefix` measures what it says: hits of whole blocks, and files of a conversation."""

from __future__ import annotations

from pathlib import Path

from cedar.bench.prefix import conversation_bytes, run_prefix
from cedar.config.presets import preset
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
