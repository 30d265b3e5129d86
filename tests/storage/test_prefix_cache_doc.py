"""Pins that every test that docs/prefix-cache.md names as a promise's guard exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "prefix-cache.md").read_text(encoding="utf-8")
    promises = re.split(r"^\d+\. \*\*", text.split("## Caveats")[0], flags=re.MULTILINE)[1:]
    assert len(promises) == 10
    sources = [
        file for folder in ("storage", "unit", "engine", "server")
        for file in (ROOT / "tests" / folder).glob("test_*.py")
    ]  # fmt: skip
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(map(Path.read_text, sources)), re.M))
    for promise in promises:
        named = re.findall(r"`(test_\w+)`", promise)
        assert len(named) >= 2, promise
        assert set(named) <= defined, set(named) - defined
