"""Pins block keys: what they depend on, what they do not, and their bytes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cedar.cache.hashing import (
    KEY_BYTES,
    Fingerprint,
    block_keys,
    chain_start,
    files_digest,
    next_key,
    weights_digest,
)
from cedar.config.presets import preset
from cedar.errors import RequestError, UsageError

BASE = Fingerprint(
    weights=b"w", config="c", plan="p", row_format="r", tokenizer=b"t", index_key_rule="corrected",
    replay_mode="report", numerics="bfloat16 reference", block_size=4,
)  # fmt: skip
ROOT = BASE.root()
ids = st.lists(st.integers(0, 200_000), max_size=40)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Fingerprint)])
def test_every_field_of_the_fingerprint_changes_the_root(name: str) -> None:
    value = getattr(BASE, name)
    other: Any = value + 1 if isinstance(value, int) else value + value[:1]
    assert dataclasses.replace(BASE, **{name: other}).root() != ROOT


def test_moving_a_byte_between_fields_changes_the_root() -> None:
    left = dataclasses.replace(BASE, config="ab", plan="c")
    right = dataclasses.replace(BASE, config="a", plan="bc")
    assert left.root() != right.root()


@given(ids, ids, st.integers(1, 7))
def test_keys_agree_exactly_as_long_as_the_ids_do(a: list[int], b: list[int], size: int) -> None:
    left, right = block_keys(ROOT, a, size), block_keys(ROOT, b, size)
    assert len(left) == len(a) // size
    for i, (x, y) in enumerate(zip(left, right, strict=False)):
        assert (x == y) == (a[: (i + 1) * size] == b[: (i + 1) * size])


@given(ids, st.integers(1, 7))
def test_keys_of_a_growing_sequence_are_extended_one_by_one(tokens: list[int], size: int) -> None:
    parent, chained = chain_start(ROOT), []
    for start in range(0, len(tokens) - size + 1, size):
        parent = next_key(parent, tokens[start : start + size])
        chained.append(parent)
    assert chained == block_keys(ROOT, tokens, size)


def test_two_prompts_sharing_two_and_a_half_pages_share_two_keys() -> None:
    a, b = list(range(16)), [*range(10), 99, 99, 12, 13, 14, 15]
    left, right = block_keys(ROOT, a, 4), block_keys(ROOT, b, 4)
    assert left[:2] == right[:2]
    assert not set(left[2:]) & set(right[2:])


def test_root_salt_and_block_size_separate_everything() -> None:
    tokens = list(range(16))
    base = set(block_keys(ROOT, tokens, 4))
    assert not base & set(block_keys(dataclasses.replace(BASE, weights=b"x").root(), tokens, 4))
    assert not base & set(block_keys(ROOT, tokens, 4, salt=b"tenant"))
    assert not base & set(block_keys(ROOT, tokens, 8))


def test_an_image_changes_the_block_it_starts_in_and_all_later_ones() -> None:
    tokens = [7] * 16
    plain = block_keys(ROOT, tokens, 4)
    red = block_keys(ROOT, tokens, 4, image_digests=[(6, b"red")])
    blue = block_keys(ROOT, tokens, 4, image_digests=[(6, b"blue")])
    moved = block_keys(ROOT, tokens, 4, image_digests=[(5, b"red")])
    assert plain[0] == red[0] == blue[0] == moved[0]
    for i in range(1, 4):
        assert len({plain[i], red[i], blue[i], moved[i]}) == 4


@pytest.mark.parametrize(
    "images", [[(3, b"a"), (3, b"b")], [(5, b"a"), (2, b"b")], [(16, b"a")], [(-1, b"a")]]
)
def test_image_positions_out_of_order_or_range_are_refused(images: list[tuple[int, bytes]]) -> None:
    with pytest.raises(RequestError, match="image positions"):
        block_keys(ROOT, [1] * 16, 4, image_digests=images)


def test_ids_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(RequestError, match="whole numbers"):
        next_key(ROOT, [1.5])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="whole numbers"):
        next_key(ROOT, [1 << 70])
    with pytest.raises(UsageError, match="block_size"):
        block_keys(ROOT, [1], 0)


def test_processes_with_different_hash_seeds_compute_the_same_keys() -> None:
    program = (
        "from cedar.cache.hashing import *\n"
        "from cedar.config.presets import preset\n"
        "f = Fingerprint.of(preset('tiny'), weights=b'w', tokenizer=b't',"
        " index_key_rule='corrected', replay_mode='report', numerics='n', block_size=4)\n"
        "print([k.hex() for k in block_keys(f.root(), range(12), 4, b's', [(5, b'i')])])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }  # fmt: skip
    assert len(seen) == 1


def test_the_bytes_of_a_key_are_pinned() -> None:
    # A change here orphans every prefix on disk: raise ROW_LAYOUT_VERSION instead of editing this.
    assert len(ROOT) == KEY_BYTES
    assert block_keys(ROOT, range(4), 4)[0].hex() == (
        "b388406b83b0056dba986a6c38ee7c5dcbce374537a23da7604b9e70b4db14b7"
    )


def test_the_fingerprint_of_a_config_follows_plan_and_row_format() -> None:
    def of(name: str, **variant: bool) -> bytes:
        config = preset(name)
        config = config.variant(**variant) if variant else config
        return Fingerprint.of(
            config, weights=b"w", tokenizer=b"", index_key_rule="corrected", replay_mode="report",
            numerics="n", block_size=8,
        ).root()  # fmt: skip

    assert of("article") == of("article")
    assert len({of("article"), of("article-thin"), of("article", ced=False, csa2=True)}) == 3


def test_one_changed_weight_changes_the_digest(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
    file = tmp_path / "model.safetensors"

    def digest(data: bytes) -> bytes:
        file.write_bytes(len(header).to_bytes(8, "little") + header + data)
        return weights_digest(tmp_path)

    assert digest(b"abc") == digest(b"abc")
    assert digest(b"abc") != digest(b"abd")


def test_a_missing_file_differs_from_an_empty_one(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    absent = files_digest([file])
    file.write_bytes(b"")
    assert files_digest([file]) != absent
