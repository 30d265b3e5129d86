"""Python snippets of the documentation run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_the_low_level_snippet_runs_and_its_logits_agree_with_the_oracle() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    names: dict[str, Any] = {}
    exec(snippet, names)
    oracle = names["oracle"]
    assert (names["logits"] - oracle[:, 3]).abs().max() < 1e-3
    assert (names["following"] - oracle[:, 4]).abs().max() < 1e-3
