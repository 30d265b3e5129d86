"""A real Chromium with one tab, the page written once, and an opener of it.

Without a browser these tests are skipped with the reason; where CI=true is set a missing browser is
a failure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opened_page import FLAGS, Opened, Opener, chromium_or_skip
from playwright.sync_api import sync_playwright

from cedar.config import preset
from cedar.page.page import write_page
from cedar.planner.export import make_report, to_json
from cedar.planner.flows import Planner
from cedar.planner.request import Request
from cedar.planner.source import resolve_model


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The browser of one file of tests.

    Not of the whole run: as long as Playwright is open its event loop counts as running in this
    thread, and `asyncio.run` in a test of another folder would be refused.
    """
    path = chromium_or_skip()
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Opened:
    """One tab for all tests of a file, since a new one costs a second; cut off from the network."""
    return Opened(browser.new_context(locale="en-US", offline=True).new_page())


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as `cedar page` writes it by default."""
    return write_page(tmp_path_factory.mktemp("page") / "cedar.html")


@pytest.fixture
def open_page(tab: Opened, page_file: Path) -> Opener:
    """`open_page(file=None, width=1280, scheme="light", motion="reduce", **state)`."""

    def open_it(
        file: Path = page_file, *, width: int = 1280, scheme: str = "light",
        motion: str = "reduce", **state: object,
    ) -> Opened:  # fmt: skip
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.page.mouse.move(0, 0)
        tab.page.emulate_media(media="screen", color_scheme=scheme, reduced_motion=motion)
        return tab.open(file, state)

    return open_it


@pytest.fixture(scope="session")
def blocked_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a model that CED cannot run on: an Engram above the cut."""
    config = preset("v4.1-flash").to_dict()
    config["text_config"]["engram_layer_ids"] = [1, 30]
    directory = tmp_path_factory.mktemp("blocked")
    (directory / "config.json").write_text(json.dumps(config))
    return write_page(directory / "cedar.html", models=[str(directory)])


@pytest.fixture
def record() -> dict[str, Any]:
    """A record as `cedar compare preset:article-thin --json` writes it, with round numbers."""
    request = Request(input_tokens=2000, output_tokens=100)
    document = to_json(make_report(Planner(resolve_model("preset:article-thin")), request))
    for number, flow in enumerate(document["flows"].values(), start=1):
        flow["measured"] = {
            "kv_bytes": flow["kv_bytes"],
            "window_bytes": flow["window_bytes"],
            "encode_token_layers": flow["encode_token_layers"],
            "decoder_token_layers": flow["decoder_token_layers"] + number,
            "prefill_seconds": 10.0 * number,
            "decode_seconds": 2.5,
            "persisted_bytes": flow["kv_bytes"],
            "persisted_kind": "derived: bytes the prefix store would write",
        }
    parsed = json.loads(json.dumps(document))
    assert isinstance(parsed, dict)
    return parsed
