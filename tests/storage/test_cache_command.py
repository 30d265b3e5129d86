"""Pins `cedar cache`: what it prints, what it changes, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from store_cases import chain, every_record_is_right, open_store, window

from cedar.cache.store_files import find_slab
from cedar.cli.cache import cache
from cedar.errors import StoreError
from cedar.units import format_bytes


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with open_store(tmp_path) as store:
        store.put_many([*chain(0, 3), window(0, 2)])
        store.get_many([chain(0, 1)[0].key])
    return tmp_path


def damage(directory: Path, offset: int = 500) -> None:
    slab = find_slab(directory)
    assert slab is not None
    data = bytearray(slab[0].read_bytes())
    data[offset] ^= 1
    slab[0].write_bytes(data)


def run_json(*arguments: object) -> tuple[dict[str, Any], BaseException | None]:
    result = CliRunner().invoke(cache, [*map(str, arguments), "--json"])
    return json.loads(result.stdout), result.exception


def run_text(*arguments: object) -> str:
    result = CliRunner().invoke(cache, [*map(str, arguments)], catch_exceptions=False)
    return result.output


def test_ls_lists_every_record(directory: Path) -> None:
    document, _ = run_json("ls", directory)
    kinds = sorted((r["kind"], r["start"], r["payload_bytes"]) for r in document["records"])
    assert kinds == [
        ("global", 0, 3000), ("global", 4, 3000), ("global", 8, 3000), ("window", 12, 20_000)
    ]  # fmt: skip
    text = run_text("ls", directory)
    header, *rows, total = (line.split() for line in text.splitlines())
    assert header == [
        "key",
        "kind",
        "root",
        "tokens",
        "depth",
        "payload",
        "on",
        "disk",
        "set",
        "aside",
    ]
    assert sorted(row[1:2] + row[3:] for row in rows) == [
        ["global", "0..4", "0", "3.00", "kB", "4.10", "kB", "-"],
        ["global", "4..8", "0", "3.00", "kB", "4.10", "kB", "-"],
        ["global", "8..12", "0", "3.00", "kB", "4.10", "kB", "-"],
        ["window", "12..12", "0", "20.00", "kB", "20.48", "kB", "-"],
    ]
    assert total == ["4", "records,", "32.77", "kB", "on", "disk"]


def test_stats_show_sizes_and_what_all_writers_counted(directory: Path) -> None:
    document, _ = run_json("stats", directory)
    assert document["records"] == 4
    assert document["slots_used"] == 8
    assert document["bytes_on_disk"] == sum(p.stat().st_size for p in directory.iterdir())
    assert document["counts"] == {
        "stored_records": 4, "stored_bytes": 29_000, "loaded_records": 1, "loaded_bytes": 3000
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in run_text("stats", directory).splitlines()]
    assert lines == [
        "records 4, of which 0 set aside",
        f"all files {format_bytes(document['bytes_on_disk'])} on disk",
        "slots used 8 of 4.10 kB each",
        "counted since the store was made:",
        "loaded_bytes 3.00 kB", "loaded_records 1", "stored_bytes 29.00 kB", "stored_records 4",
    ]  # fmt: skip


def test_verify_of_a_sound_store_changes_nothing(directory: Path) -> None:
    before = {p.name: p.read_bytes() for p in directory.iterdir() if "-" not in p.suffix}
    document, error = run_json("verify", directory)
    assert error is None
    assert (document["checked"], document["payload_bytes"], document["damaged"]) == (4, 29_000, [])
    assert {p.name: p.read_bytes() for p in directory.iterdir() if "-" not in p.suffix} == before


def test_verify_of_a_damaged_store_names_the_records_and_exits_5(directory: Path) -> None:
    damage(directory)
    document, error = run_json("verify", directory)
    assert isinstance(error, StoreError)
    assert error.exit_code == 5
    assert "1 damaged records" in str(error)
    assert f"cedar cache gc {directory}" in str(error)
    assert [r["problem"] for r in document["damaged"]] == ["damaged"]


def test_gc_removes_what_is_damaged_and_verify_is_content(directory: Path) -> None:
    damage(directory, offset=4096 + 500)
    document, error = run_json("gc", directory)
    assert error is None
    assert document["damaged"] == 1
    # The block behind the damaged one and the windows behind that are of no use any more.
    assert document["removed"] == 3
    assert document["bytes_after"] < document["bytes_before"]
    assert run_json("verify", directory)[1] is None


def test_gc_to_a_size_and_its_refusals(directory: Path) -> None:
    with open_store(directory, limit=3_000_000) as store:
        for number in range(20):
            store.put_many(chain(number, 10))
        with pytest.raises(StoreError, match="is being written by"):
            run_text("gc", directory)
    with pytest.raises(StoreError, match="is too small"):
        run_text("gc", directory, "--size", "100kB")
    text = run_text("gc", directory, "--size", "500kB")
    assert re.search(
        r"removed \d+ records \(0 damaged\), \d+ are left; all files \S+ kB before", text
    )
    assert sum(p.stat().st_size for p in directory.iterdir()) <= 500_000
    with open_store(directory) as store:
        assert every_record_is_right(store) > 0


@pytest.mark.parametrize("verb", ["ls", "stats", "verify", "gc"])
def test_a_directory_that_is_no_store_is_refused_and_left_alone(tmp_path: Path, verb: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(StoreError, match="is not a prefix store"):
        run_text(verb, tmp_path)
    with pytest.raises(StoreError, match="is not a prefix store"):
        run_text(verb, tmp_path / "absent")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
