"""The page as one file: style, words, data and scripts put into `static/page.html`.

The result works from `file://` and asks for nothing over the network. Scripts are ES modules kept as
text in the page; a few lines at its end give each an address, so nothing is built or bundled.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EISDIR
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import cedar
from cedar.errors import CedarError, UsageError
from cedar.page.figures import DEFAULT_MODELS, page_data
from cedar.page.record import model_name
from cedar.planner.flows import Planner
from cedar.planner.request import INPUT_TOKENS, OUTPUT_TOKENS, Flow, Request
from cedar.planner.source import resolve_model

LANGUAGES = ("en", "zh")


def write_page(
    path: Path, *, compare: dict[str, Any] | None = None, models: Sequence[str] = DEFAULT_MODELS,
    request: Request | None = None, flow: Flow = "ced+csa2",
) -> Path:  # fmt: skip
    """Write the page; the whole file or none. Directories are made if need be.

    Args:
        compare: a checked record of `cedar compare`; its model is shown first.
        models: MODEL arguments to choose from, the first is shown first.
        request: what the controls show first; by default the record's request or the article's.

    Raises:
        UsageError: a model is unknown, or the file cannot be written.
        RequestError: the request is longer than the context of the first model.
    """
    planners = page_planners(models, compare)
    request = request or first_request(compare)
    document = render_page(page_data(planners, request, flow), compare)
    partial = _partial(path)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(document, encoding="utf-8")
        partial.replace(path)
    return path


def check_writable(path: Path) -> None:
    """Refuse a path that `write_page` could not write; makes its directories.

    Raises:
        UsageError: it is a directory, or nothing can be written beside it.
    """
    if path.is_dir():
        raise UsageError(
            f"cannot write {path}: {os.strerror(EISDIR)}; give the name of the file to write"
        )
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _partial(path).touch()
        _partial(path).unlink()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A failure to write becomes a refusal, and nothing is left behind."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            _partial(path).unlink()
        raise UsageError(
            f"cannot write {path}: {error.strerror}; choose a directory you can write to"
        ) from None


def first_request(record: dict[str, Any] | None) -> Request:
    """The request of a record, or the article's."""
    sizes = {} if record is None else record["request"]
    return Request(
        input_tokens=sizes.get("input_tokens", INPUT_TOKENS),
        output_tokens=sizes.get("output_tokens", OUTPUT_TOKENS),
    )


def page_planners(models: Sequence[str], record: dict[str, Any] | None) -> list[Planner]:
    """The models asked for, once each, that of the record first.

    A record's model that is not found here is left out; the page then says so beside the record
    and shows the record's own predictions.

    Raises:
        UsageError: a model that was asked for is unknown.
    """
    planners = {name: Planner(resolve_model(name)) for name in models}
    if record is None:
        return list(planners.values())
    name = model_name(record)
    first = planners.pop(name, None)
    if first is None:
        with suppress(CedarError):
            first = Planner(resolve_model(name))
    return ([] if first is None else [first]) + list(planners.values())


def render_page(data: dict[str, Any], record: dict[str, Any] | None = None) -> str:
    """The whole HTML document.

    Args:
        data: what `figures.page_data` made.
        record: a checked `cedar compare` record to open the page with.
    """
    texts = words()
    places = {
        "version": cedar.__version__,
        "style": _read("page.css"),
        "noscript": texts["en"]["text"]["noscript"],
        "data": _json(data),
        "words": _json(texts),
        "record": "" if record is None else _json(record),
        "modules": "\n".join(_module(name) for name in module_names()),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: places[match[1]], _read("page.html"))


def words() -> dict[str, Any]:
    """Texts by language: `text` by key, `differences` by the topic they translate."""
    return {language: json.loads(_read(f"text.{language}.json")) for language in LANGUAGES}


def static_files() -> Traversable:
    """The directory of the page's frame, style sheet, words and scripts."""
    return resources.files("cedar.page") / "static"


def module_names() -> tuple[str, ...]:
    """File names of the scripts, in alphabetical order."""
    return tuple(sorted(file.name for file in (static_files() / "js").iterdir()))


def _read(name: str) -> str:
    return (static_files() / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that may stand inside a <script>."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _module(name: str) -> str:
    return f'<script type="text/plain" data-module="{name}">\n{_read(f"js/{name}")}</script>'
