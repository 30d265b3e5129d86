"""A `cedar compare` record in the page: inside the file or chosen by hand; bad ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opened_page import Opened, Opener

from cedar.page.page import write_page


def choose(opened: Opened, path: Path) -> str:
    """Load a record as a reader does; what the page then says."""
    opened.page.set_input_files("#record-file", path)
    opened.page.wait_for_function("!document.getElementById('record-file').value")
    return str(opened.page.inner_text("#record-state"))


def table(opened: Opened) -> dict[tuple[str, str], tuple[float, float | None]]:
    """{(flow, quantity): (measured, predicted)} of the table."""
    rows = opened.page.eval_on_selector_all(
        "#record-table tbody tr",
        """rows => rows.map((row) => {
          const { flow, quantity, measured } = row.querySelector("[data-measured]").dataset;
          const predicted = row.querySelector("[data-predicted]")?.dataset.predicted;
          return [flow, quantity, Number(measured), predicted === undefined ? null : Number(predicted)];
        })""",
    )
    return {(flow, quantity): (measured, predicted) for flow, quantity, measured, predicted in rows}


def check_table(opened: Opened, record: dict[str, Any]) -> None:
    shown = table(opened)
    for flow, numbers in record["flows"].items():
        for name, value in numbers["measured"].items():
            if name == "persisted_kind":
                continue
            measured, predicted = shown[flow, name]
            assert measured == value
            assert predicted == (None if name.endswith("seconds") else numbers[name])


def test_a_record_in_the_file_sets_the_request_and_stands_beside_the_predictions(
    open_page: Opener, tmp_path: Path, record: dict[str, Any]
) -> None:
    opened = open_page(write_page(tmp_path / "with.html", compare=record))
    assert opened.page.input_value("#model") == "preset:article-thin"
    assert opened.page.input_value("#input_tokens") == "2,000"
    check_table(opened, record)
    words = opened.page.text_content("#figure-8 .drawing")
    assert "measured 7.48 MB" in words
    assert "measured: prefill 20 s, decode 2.5 s" in words
    assert opened.page.locator("#figure-8 .mark.measured").count() == 1  # persisted is derived
    difference = opened.page.locator('#record-table tr:has([data-quantity="kv_bytes"]) td').last
    assert difference.inner_text() == "equal"
    opened.check()


def test_a_record_chosen_by_hand_does_the_same_in_the_middle_of_the_page(
    open_page: Opener, tmp_path: Path, record: dict[str, Any]
) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    opened = open_page()
    assert choose(opened, path) == "preset:article-thin, 2,000 + 100 tokens"
    assert opened.page.input_value("#input_tokens") == "2,000"
    check_table(opened, record)
    opened.enter("input_tokens", "3000")  # another request: measured marks go, the table stays
    assert opened.page.locator(".mark.measured").count() == 0
    check_table(opened, record)
    opened.page.click("#record-table button")
    assert opened.page.input_value("#input_tokens") == "2,000"
    assert opened.page.locator(".mark.measured").count() == 4
    opened.check()


def test_a_record_of_an_unknown_model_shows_its_own_predictions(
    open_page: Opener, tmp_path: Path, record: dict[str, Any]
) -> None:
    record["model"]["name"] = "/nowhere/model"
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    opened = open_page()
    choose(opened, path)
    assert opened.page.input_value("#model") == "preset:article"
    assert "cedar page --model /nowhere/model" in opened.page.inner_text("#record-table")
    check_table(opened, record)
    opened.check()


def bad_files(record: dict[str, Any]) -> list[tuple[str, str]]:
    """(text of a file, what the page says about it)."""

    def without(**changes: object) -> str:
        return json.dumps(record | changes)

    return [
        ("{", "not JSON"),
        (json.dumps([record]), "no model name"),
        (without(model={}), "no model name"),
        (without(request={"input_tokens": 0}), "no request"),
        (without(flows={"both": {}}), "no known flow"),
        (without(flows={"ced": {"kv_bytes": 1}}), "not a run"),
        (without(flows={"ced": {"measured": {"kv_bytes": "many"}}}),
         "kv_bytes of flow ced is not a number"),
    ]  # fmt: skip


def test_a_file_that_is_no_record_is_refused_and_changes_nothing(
    open_page: Opener, tmp_path: Path, record: dict[str, Any]
) -> None:
    opened = open_page()
    before = opened.values()
    for number, (text, says) in enumerate(bad_files(record)):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        assert says in choose(opened, path)
        assert opened.values() == before
        assert opened.page.locator("#record-table table").count() == 0
    opened.check()
