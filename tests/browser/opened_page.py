"""A page opened in the browser: what it shows, how to work its controls, what went wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Opened:
    """A page in the browser and what went wrong in it.

    Attributes:
        page: playwright's page.
        errors: console errors and uncaught exceptions.
        requests: addresses asked for, the file itself and data: addresses left out.
    """

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Nothing may have gone wrong, and nothing may have left the file."""
        assert self.errors == []
        assert self.requests == []

    def values(self, place: str = "body") -> dict[tuple[str, str], float]:
        """{(flow, ledger line): number} of everything shown under a selector."""
        found = self.page.eval_on_selector_all(
            f"{place} [data-line]",
            "all => all.map(one => [one.dataset.flow, one.dataset.line, one.dataset.value])",
        )
        return {(flow, line): float(value) for flow, line, value in found}

    def drawing(self, figure: int) -> str:
        """The drawing of one figure as text."""
        return str(self.page.inner_html(f"#figure-{figure} .drawing"))

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
