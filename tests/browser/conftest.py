"""A real Chromium, the page written once, and an opener that watches for errors and requests.

Without a browser these tests are skipped with the reason; where CI=true is set a missing browser is
a failure. The browser of the system is used: CHROMIUM names another one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from opened_page import Opened, Opener

from cedar.config import preset
from cedar.page.page import write_page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Path of the browser, if there is one."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = chromium()
    if path is None:
        reason = f"no browser: none of {', '.join(NAMES)} is on PATH and CHROMIUM is not set"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}; in CI the page must be tested, install chromium")
        pytest.skip(reason)
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as `cedar page` writes it by default."""
    return write_page(tmp_path_factory.mktemp("page") / "cedar.html")


@pytest.fixture
def open_page(browser: Any, page_file: Path) -> Iterator[Opener]:
    """`open_page(file=None, width=1280, locale="en-US", scheme="light", **state)`."""
    contexts = []

    def open_it(
        file: Path = page_file, *, width: int = 1280, locale: str = "en-US",
        scheme: str = "light", motion: str = "reduce", **state: object,
    ) -> Opened:  # fmt: skip
        context = browser.new_context(
            viewport={"width": width, "height": 900}, locale=locale, color_scheme=scheme,
            reduced_motion=motion, offline=True,
        )  # fmt: skip
        contexts.append(context)
        opened = Opened(context.new_page())
        page = opened.page
        page.on("pageerror", lambda error: opened.errors.append(str(error)))
        page.on(
            "console",
            lambda message: (
                message.type in ("error", "warning") and opened.errors.append(message.text)
            ),
        )
        page.on(
            "request",
            lambda request: (
                request.url.split("#")[0] == file.as_uri()
                or request.url.startswith("data:")
                or opened.requests.append(request.url)
            ),
        )
        page.goto(file.as_uri() + (f"#{urlencode(state)}" if state else ""))
        page.wait_for_selector("#figure-10 svg")
        return opened

    yield open_it
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def shared_page(browser: Any, page_file: Path) -> Iterator[Opened]:
    """One open page for tests that leave it as they found it."""
    context = browser.new_context(locale="en-US", reduced_motion="reduce")
    opened = Opened(context.new_page())
    opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.page.goto(page_file.as_uri())
    opened.page.wait_for_selector("#figure-10 svg")
    yield opened
    context.close()


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
    from cedar.planner.export import make_report, to_json
    from cedar.planner.flows import Planner
    from cedar.planner.request import Request
    from cedar.planner.source import resolve_model

    request = Request(input_tokens=2000, output_tokens=100)
    report = make_report(Planner(resolve_model("preset:article-thin")), request)
    document = to_json(report)
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
    return json.loads(json.dumps(document))
