"""The browser, and a page opened in it: what it shows, how to work it, what went wrong in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Path of the system's browser, or of the one that CHROMIUM names; None if there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def chromium_or_skip() -> str:
    """Path of the browser; without one the test is skipped, or fails where CI=true is set."""
    path = chromium()
    if path is not None:
        return path
    reason = f"no browser: none of {', '.join(NAMES)} is on PATH and CHROMIUM is not set"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; in CI the page must be tested, install chromium")
    pytest.skip(reason)


@dataclass
class Opened:
    """A tab and what went wrong in it since the page was opened last.

    Attributes:
        page: playwright's page.
        address: the file that was opened.
        errors: console errors and warnings, and uncaught exceptions.
        requests: addresses asked for, except the file itself and data: addresses.
    """

    page: Any
    address: str = ""
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith("data:") and request.url.split("#")[0] != self.address:
            self.requests.append(request.url)

    def open(self, file: Path, state: dict[str, object]) -> Opened:
        """Load the file anew with a state in its address."""
        self.page.goto("about:blank")
        self.errors.clear()
        self.requests.clear()
        self.address = file.as_uri()
        self.page.goto(self.address + (f"#{urlencode(state)}" if state else ""))
        self.page.wait_for_selector("#figure-10 svg")
        return self

    def check(self) -> None:
        """Nothing may have gone wrong, and nothing may have left the file."""
        assert self.errors == []
        assert self.requests == []

    def open_ledger(self) -> None:
        """Show the whole ledger of the chosen flow; the browser says later that it is open."""
        self.page.locator("#ledger summary").click()
        self.page.locator("#ledger tbody tr").first.wait_for()

    def values(self, place: str = "body") -> dict[tuple[str, str], float]:
        """{(flow, ledger line): number} of everything shown under a selector."""
        found = self.page.eval_on_selector_all(
            f"{place} [data-line]",
            "all => all.map(one => [one.dataset.flow, one.dataset.line, one.dataset.value])",
        )
        return {(flow, line): float(value) for flow, line, value in found}

    def drawings(self) -> list[str]:
        """The ten drawings as text."""
        found = self.page.eval_on_selector_all(
            ".figure .drawing", "all => all.map(one => one.innerHTML)"
        )
        assert len(found) == 10
        return [str(text) for text in found]

    def enter(self, control: str, value: str) -> None:
        """Type a number into a control."""
        self.page.fill(f"#{control}", value)

    def choose_flow(self, flow: str) -> None:
        """Choose a flow as a mouse does."""
        self.page.locator(f'#flow label:has(input[value="{flow}"])').click()

    def problem(self) -> str:
        """What the page says is wrong with the request; empty if nothing is."""
        return str(self.page.text_content("#problem")) if self.page.is_visible("#problem") else ""


Opener = Callable[..., Opened]
