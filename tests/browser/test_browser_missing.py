"""Without a browser the tests say so: skipped by hand, failed in CI."""

from __future__ import annotations

from pathlib import Path

import pytest
from opened_page import chromium_or_skip


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_a_missing_browser_is_a_failure_in_ci_and_a_skip_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="no browser: none of chromium"):
        chromium_or_skip()


def test_the_variable_names_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", "/opt/browser")
    assert chromium_or_skip() == "/opt/browser"
