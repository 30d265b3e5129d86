"""`cedar page` from the outside: the file, its JSON document, and messages for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cedar.cli.page import page
from cedar.errors import RequestError, UsageError
from cedar.page.record import read_record

SMALL = ("--model", "preset:tiny", "--input-tokens", "20", "--output-tokens", "5")


def run(*arguments: object) -> str:
    """Standard output of `cedar page ARGUMENTS`; errors propagate as the entry point sees them."""
    result = CliRunner().invoke(page, [str(a) for a in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_it_writes_one_file_into_a_directory_it_makes(tmp_path: Path) -> None:
    out = tmp_path / "new" / "site"
    document = json.loads(run("--out", out, "--json", *SMALL))
    assert document["path"] == str(out / "cedar.html")
    assert document["bytes"] == (out / "cedar.html").stat().st_size
    assert document["models"] == ["preset:tiny"]
    assert [path.name for path in out.iterdir()] == ["cedar.html"]
    assert "wrote" in run("--out", out, *SMALL)  # again: replaced


def test_the_default_models_are_the_article_the_release_the_thin_body_and_nano(
    tmp_path: Path,
) -> None:
    document = json.loads(run("--out", tmp_path, "--json"))
    assert document["models"] == ["preset:article", "preset:v4.1-flash", "preset:article-thin",
                                  "nano"]  # fmt: skip


def test_it_runs_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from cedar.cli.main import main\n"
        f"sys.argv = ['cedar', 'page', '--out', {str(tmp_path)!r}, '--model', 'nano']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("kind", ["file in the way", "parent is a file", "unwritable"])
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    out = {"file in the way": file, "parent is a file": file / "deeper",
           "unwritable": Path("/proc/cedar")}[kind]  # fmt: skip
    with pytest.raises(UsageError) as caught:
        run("--out", out, *SMALL)
    message = str(caught.value)
    assert str(out) in message
    assert "choose a directory you can write to" in message
    assert file.read_text() == "mine"


@pytest.mark.parametrize("tokens", ["0", "-3", "1.5", "many", "12 apples"])
def test_token_counts_that_are_not_possible_are_refused(tmp_path: Path, tokens: str) -> None:
    for option in ("--input-tokens", "--output-tokens", "--tokens-per-turn"):
        with pytest.raises(UsageError, match=option):
            run("--out", tmp_path, option, tokens)
    assert not any(tmp_path.iterdir())


def test_a_request_longer_than_the_context_and_an_unknown_model_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(RequestError, match="allowed at most 1,048,576"):
        run("--out", tmp_path, "--input-tokens", "2m")
    with pytest.raises(UsageError, match="article"):
        run("--out", tmp_path, "--model", "preset:articel")
    assert not any(tmp_path.iterdir())


GOOD: dict[str, Any] = {
    "model": {"name": "preset:tiny"},
    "request": {"input_tokens": 20, "output_tokens": 5},
    "flows": {"none": {"measured": {"kv_bytes": 100, "prefill_seconds": 0.5}}, "ced": {}},
}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([1], "it holds a list, not an object"),
        (GOOD | {"model": 5}, "no model name"),
        (GOOD | {"request": {"input_tokens": 0, "output_tokens": 5}}, "request.input_tokens is 0"),
        (GOOD | {"request": {"input_tokens": 20}}, "request.output_tokens is None"),
        (GOOD | {"request": 3}, "request.input_tokens is None"),
        (GOOD | {"flows": {}}, "no flows"),
        (GOOD | {"flows": {"both": {}}}, "the flows both; known are none, ced, csa2, ced+csa2"),
        (GOOD | {"flows": {"ced": {"kv_bytes": 1}}}, "a plan, not a run"),
        (GOOD | {"flows": {"ced": {"measured": 7}}}, "flows.ced.measured is 7"),
        (GOOD | {"flows": {"ced": {"measured": {"kv_bytes": "much"}}}},
         "flows.ced.measured.kv_bytes is 'much'"),
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_refused_with_what_is_wrong(
    tmp_path: Path, document: Any, says: str
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    with pytest.raises(UsageError) as caught:
        run("--out", tmp_path, "--compare", path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "cedar compare MODEL --json" in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(UsageError, match="cannot read the record"):
            run("--out", tmp_path, "--compare", path)


def test_a_good_record_brings_its_model_and_request(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(GOOD))
    assert read_record(path) == GOOD
    document = json.loads(run("--out", tmp_path, "--compare", path, "--json", "--model", "nano"))
    assert document["models"] == ["preset:tiny", "nano"]
    text = (tmp_path / "cedar.html").read_text(encoding="utf-8")
    assert '"controls":{"input_tokens":20,"output_tokens":5' in text


def test_the_default_request_fits_a_model_with_a_short_context(tmp_path: Path) -> None:
    run("--out", tmp_path, "--model", "preset:tiny")
    text = (tmp_path / "cedar.html").read_text(encoding="utf-8")
    assert '"controls":{"input_tokens":3096,"output_tokens":1000' in text
