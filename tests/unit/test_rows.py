"""The byte calculator: row sizes, bytes per token of every plan, windows and open groups."""

from __future__ import annotations

import pytest

from cedar.cache.state import ModelState
from cedar.config.presets import preset, preset_names
from cedar.errors import ConfigError
from cedar.formats.rows import RowFormat, RowFormats


def test_release_rows_are_288_68_and_528_bytes() -> None:
    formats = RowFormats.of(preset("v4.1-flash"))
    assert formats.main.row_bytes == 288
    assert (formats.main.value_bytes, formats.main.scale_bytes) == (256, 32)
    assert formats.index.row_bytes == 68
    assert (formats.index.value_bytes, formats.index.scale_bytes) == (64, 4)
    assert formats.window.row_bytes == 528
    assert (formats.window.value_bytes, formats.window.scale_bytes) == (512, 16)
    assert formats.global_row_bytes == 356


SLOPES = [
    ("v4.1-flash", True, 890),
    ("v4.1-flash", False, 10_324),
    ("article", True, 890),
    ("article", False, 3_560),
    ("article-thin", True, 890),
    ("article-thin", False, 3_560),
]


@pytest.mark.parametrize(("name", "csa2", "expected"), SLOPES)
@pytest.mark.parametrize("ced", [False, True])
def test_bytes_per_token(name: str, csa2: bool, expected: int, ced: bool) -> None:
    config = preset(name).variant(ced=ced, csa2=csa2)
    formats = RowFormats.of(config)
    assert formats.kv_bytes_per_token(config.plan) == expected
    assert formats.kv_bytes(config.plan, 1000) == 1000 * expected


def test_a_million_tokens_of_the_release() -> None:
    config = preset("v4.1-flash")
    assert RowFormats.of(config).kv_bytes(config.plan, 1_048_576) == 933_232_640


def test_only_whole_groups_have_rows() -> None:
    config = preset("v4.1-flash")
    formats = RowFormats.of(config)
    assert formats.kv_bytes(config.plan, 0) == 0
    assert formats.kv_bytes(config.plan, 1) == 356  # layer 20 only
    assert formats.kv_bytes(config.plan, 3) == 3 * 356 + 3 * 356


def test_moving_the_sources_changes_the_slope() -> None:
    """Decoder layers own nothing unless the plan says so (regression class: a planner that gives
    every decoder layer its own rows)."""
    from dataclasses import replace

    config = preset("v4.1-flash")
    fewer = replace(
        config,
        kv_source_layer_ids=(2, 8, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    )
    assert RowFormats.of(config).kv_bytes_per_token(fewer.plan) == 890 - 178


def test_windows_do_not_grow_with_the_context() -> None:
    config = preset("v4.1-flash")
    formats = RowFormats.of(config)
    assert formats.window_bytes(config.plan) == 40 * 128 * 528 == 2_703_360
    assert formats.window_bytes(config.plan, 1_000_000) == 2_703_360
    assert formats.window_bytes(config.plan, 5) == 40 * 5 * 528


def test_open_groups_of_the_release() -> None:
    config = preset("v4.1-flash")
    assert RowFormats.of(config).open_group_bytes(config.plan) == 12_288
    article = preset("article")
    assert RowFormats.of(article).open_group_bytes(article.plan) == 10 * 3 * 2 * 512 * 4


@pytest.mark.parametrize(
    ("kind", "width", "group"), [("main", 24, 16), ("index", 16, 32), ("window", 0, 32)]
)
def test_impossible_widths_are_refused(kind: str, width: int, group: int) -> None:
    message = f"a {kind} row of {width} values is not possible: .* positive multiple of {group}"
    with pytest.raises(ConfigError, match=message):
        RowFormat(kind, width)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n in preset_names() if n.startswith("tiny") or n == "nano"])
def test_pools_and_rings_are_allocated_by_the_calculator(name: str) -> None:
    """Allocated bytes equal calculated bytes, and Reuse and Reindex layers own no buffer."""
    config = preset(name)
    plan, formats = config.plan, RowFormats.of(config)
    state = ModelState.contiguous(config, max_tokens=300, batch=2)
    capacity = state.max_tokens
    assert capacity >= 300
    assert state.pool.nbytes == 2 * formats.kv_bytes(plan, capacity)
    assert state.pool.block_bytes == formats.kv_bytes(plan, state.pool.block_size)
    assert set(state.pool.main) == set(state.pool.index) == {s.layer_id for s in plan.kv_owners}
    assert state.rings.nbytes == 2 * formats.window_bytes(plan)
    open_bytes = sum(t.nbytes for t in (*state.open_kv.values(), *state.open_gate.values()))
    assert open_bytes == 2 * formats.open_group_bytes(plan)
    assert state.kv_bytes() == state.window_bytes() == 0
