"""`cedar cache ls|verify|gc|stats DIR`: look at a prefix store on disk, check it, tidy it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from cedar.cache.store import PrefixStore
from cedar.cache.store_files import directory_bytes, find_slab
from cedar.cache.store_format import RecordInfo
from cedar.cache.store_reader import PrefixReader
from cedar.errors import StoreError
from cedar.units import format_bytes, parse_bytes

_ANY_ROOT = bytes(32)

_directory = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


@click.group()
def cache() -> None:
    """Look at, check and tidy the prefix store in DIR."""


@cache.command()
@_directory
@_json
def ls(directory: Path, as_json: bool) -> None:
    """List the records, least recently used first."""
    with PrefixReader(directory) as reader:
        infos = reader.ls()
        slot_bytes = reader.stats().slot_bytes
    records = [_described(info, slot_bytes) for info in infos]
    if as_json:
        _print_json({"directory": str(directory), "records": records})
        return
    if records:
        click.echo(
            f"{'key':<16}  {'kind':<6}  {'root':<8}  {'tokens':<17}  {'depth':>5}  {'payload':>10}  "
            f"{'on disk':>10}  set aside"
        )
    for record in records:
        span = f"{record['start']}..{record['start'] + record['tokens']}"
        click.echo(
            f"{record['key'][:16]}  {record['kind']:<6}  {record['root'][:8]}  {span:<17}  "
            f"{record['depth']:>5}  {format_bytes(record['payload_bytes']):>10}  "
            f"{format_bytes(record['disk_bytes']):>10}  {record['problem'] or '-'}"
        )
    total = sum(record["disk_bytes"] for record in records)
    click.echo(f"{len(records)} records, {format_bytes(total)} on disk", err=True)


@cache.command()
@_directory
@_json
def verify(directory: Path, as_json: bool) -> None:
    """Read and check every record; exit code 5 if any is damaged. Changes nothing."""
    with PrefixReader(directory) as reader:
        report = reader.verify()
        slot_bytes = reader.stats().slot_bytes if report.index_problem is None else 0
    damaged = [
        {**_described(info, slot_bytes), "problem": problem} for info, problem in report.damaged
    ]
    if as_json:
        _print_json(
            {
                "directory": str(directory),
                "checked": report.checked,
                "payload_bytes": report.payload_bytes,
                "damaged": damaged,
                "index_problem": report.index_problem,
            }
        )
    else:
        for record in damaged:
            click.echo(f"{record['key'][:16]}  {record['kind']:6}  {record['problem']}")
        good = report.checked - len(damaged)
        click.echo(f"{good} of {report.checked} records are whole", err=True)
    if not report.sound:
        what = f"{len(damaged)} damaged records"
        if report.index_problem is not None:
            what += f", index: {report.index_problem}"
        raise StoreError(
            f"{directory} is damaged: {what}. They are misses and do no harm; "
            f"`cedar cache gc {directory}` removes them"
        )


@cache.command()
@_directory
@click.option("--size", help="Also evict down to this size, such as 4GiB.")
@_json
def gc(directory: Path, size: str | None, as_json: bool) -> None:
    """Remove damaged and unreachable records and give their space back; no server may write DIR."""
    limit = None if size is None else parse_bytes(size, "--size")
    before = directory_bytes(directory) if directory.is_dir() else 0
    found = find_slab(directory) if directory.is_dir() else None
    if found is None:
        raise StoreError(f"{directory} is not a prefix store: it has no slab file")
    # Large enough that opening does not evict: that is what --size is for.
    room = 2 * before + (64 << 20)
    store = PrefixStore(directory, root=_ANY_ROOT, limit_bytes=room, record_bytes=found[1] - 164)
    with store:
        bad = store.verify()
        removed = store.gc(limit)
        left = store.stats()
    report: dict[str, Any] = {
        "directory": str(directory),
        "damaged": len(bad.damaged),
        "removed": removed,
        "records": left.records,
        "bytes_before": before,
        "bytes_after": directory_bytes(directory),
    }
    if as_json:
        _print_json(report)
        return
    click.echo(
        f"removed {removed} records ({len(bad.damaged)} damaged), {left.records} are left; all files "
        f"{format_bytes(before)} before, {format_bytes(report['bytes_after'])} now",
        err=True,
    )


@cache.command()
@_directory
@_json
def stats(directory: Path, as_json: bool) -> None:
    """Sizes, and what all writers have counted since the store was made."""
    with PrefixReader(directory) as reader:
        result = reader.stats()
    if as_json:
        _print_json(dataclasses.asdict(result))
        return
    click.echo(f"records      {result.records:,}, of which {result.records_set_aside:,} set aside")
    click.echo(f"all files    {format_bytes(result.bytes_on_disk)} on disk")
    click.echo(f"slots used   {result.slots_used:,} of {format_bytes(result.slot_bytes)} each")
    if result.counts:
        click.echo("counted since the store was made:")
    for name, count in sorted(result.counts.items()):
        shown = format_bytes(count) if name.endswith("_bytes") else f"{count:,}"
        click.echo(f"  {name:<26} {shown:>10}")


def _described(info: RecordInfo, slot_bytes: int) -> dict[str, Any]:
    return {
        "key": info.key.hex(),
        "kind": info.kind.name.lower(),
        "root": info.root.hex(),
        "parent": info.parent.hex(),
        "start": info.start,
        "tokens": info.tokens,
        "depth": info.depth,
        "payload_bytes": info.payload_bytes,
        "disk_bytes": len(info.slots) * slot_bytes,
        "problem": info.problem,
    }


def _print_json(document: dict[str, Any]) -> None:
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")
