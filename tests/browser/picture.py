"""Renews the pictures of figures 7 to 10: `python tests/browser/picture.py docs/img`.

Writes flows-light.png and flows-dark.png from the page as `cedar page` makes it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from opened_page import FLAGS, Opened, chromium
from playwright.sync_api import sync_playwright

from cedar.page.page import write_page

#: Only the four figures: no controls above them, no words below.
ALONE = """
.controls, .section-flows h2, .section-flows > p, .section-flows figcaption { display: none; }
.section-flows { padding: 24px; }
.figure.chosen { border-color: var(--rule); box-shadow: none; }
"""


def take(directory: Path) -> None:
    """Write one picture a theme."""
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        page_file = write_page(Path(made) / "cedar.html")
        running = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        context = running.new_context(
            locale="en-US", device_scale_factor=1.5, viewport={"width": 1100, "height": 1300}
        )
        for theme in ("light", "dark"):
            opened = Opened(context.new_page()).open(page_file, {"theme": theme})
            opened.page.add_style_tag(content=ALONE)
            opened.check()
            opened.page.locator(".section-flows").screenshot(path=directory / f"flows-{theme}.png")
        running.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]))
