"""How far a whole model may be from its recording. No tests here; reasons in tests/vectors/README.md."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from closeness import row_errors
from torch import Tensor

MODELS = ("m1", "m2", "m3", "m6", "m7")
#: Projections of these quantise their input, so one flipped FP8 code moves all later rows.
QUANTISED = ("m2", "m7")
#: Models with recorded replays and prefix hits.
REPLAYED = ("m1", "m6")


@cache
def case_file(directory: Path) -> dict[str, Any]:
    """Lengths used in a recording, and the noise measured when it was made."""
    document: dict[str, Any] = json.loads((directory / "golden.json").read_text(encoding="utf-8"))
    return document


def assert_logits_f32(model: str, actual: Tensor, expected: Tensor) -> None:
    """float32 arithmetic: strict, except where an FP8 flip of a projection input is possible."""
    errors = row_errors(actual, expected)
    if model in QUANTISED:
        assert errors.median() <= 0.1, f"median row off by {errors.median():.3g}"
        assert errors.max() <= 1.5, f"worst row off by {errors.max():.3g}"
    else:
        assert errors.max() <= 5e-3, f"worst row off by {errors.max():.3g}"


def assert_logits_bf16(
    directory: Path, name: str, actual: Tensor, expected: Tensor, *, noise_of: str | None = None
) -> None:
    """bfloat16 end to end: twice the noise measured at recording time, and never above the caps.

    Args:
        name: the recorded tensor.   noise_of: tensor whose measured noise is used; its own by
            default, none where nothing was measured.
    """
    model = directory.name.split("-")[0]
    measured = case_file(directory)["measured"]["noise_bf16 (max, median |dlogit| over rows)"]
    cap_max, cap_median = (4.0, 2.2 if model == "m6" else 1.2)
    if name.startswith("nosel."):
        cap_max, cap_median = 0.8, 0.2
    worst, median = measured.get(noise_of or name, (cap_max, cap_median))
    errors = row_errors(actual, expected)
    # The floors allow for single rows, whose measured noise is one draw of many.
    assert errors.max() <= min(cap_max, max(2 * worst, 0.8)), f"worst row off by {errors.max():.3g}"
    if len(errors) > 1:
        allowed = min(cap_median, max(2 * median, 0.2))
        assert errors.median() <= allowed, f"median row off by {errors.median():.3g}"
    if len(errors) >= 16:
        same = (actual.argmax(-1) == expected.argmax(-1)).float().mean()
        assert same >= 0.75, f"same argmax in {same:.0%} of the rows"


def assert_logits(directory: Path, dtype: str, name: str, actual: Tensor, expected: Tensor) -> None:
    """The bound of the arithmetic."""
    if dtype == "float32":
        assert_logits_f32(directory.name.split("-")[0], actual, expected)
    else:
        assert_logits_bf16(directory, name, actual, expected)


def selected(rows: Tensor) -> list[set[int]]:
    """Index rows `[n, k]` as sets; unused slots are negative."""
    return [{p for p in row if p >= 0} for row in rows.tolist()]


def assert_selections(
    model: str, dtype: str, actual: Tensor, expected: Tensor, gaps: Tensor | None = None
) -> None:
    """Selections of one index source, `[n, k]` each.

    float32: equal wherever the recorded gap to the next position exceeds 1e-6. Quantised
    projections: nearly all rows. bfloat16: mean overlap of full rows at least 0.85.
    """
    mine, theirs = selected(actual), selected(expected)
    clear = [True] * len(theirs) if gaps is None else (gaps > 1e-6).tolist()
    if dtype == "float32":
        assert sum(clear) >= 0.9 * len(clear)
        wrong = [n for n, ok in enumerate(clear) if ok and mine[n] != theirs[n]]
        allowed = len(theirs) // 10 if model in QUANTISED else 0
        assert len(wrong) <= allowed, f"queries {wrong} select other rows"
        return
    width = expected.shape[1]
    full = [n for n, row in enumerate(theirs) if len(row) == width]
    assert full
    overlap = torch.tensor([len(mine[n] & theirs[n]) / width for n in full]).mean()
    assert overlap >= 0.85, f"mean overlap {overlap:.3f}"
    for n, row in enumerate(theirs):
        if len(row) < width:
            assert mine[n] == row, f"query {n} must see everything there is"
