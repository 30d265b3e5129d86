"""Weights: counted from the schema, measured from headers, split, padded and page-locked.

Pins public planner failures: pinned buffers that round to powers of two, experts padded by a
tensor-parallel split, and weights taken from active instead of stored parameters.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from cedar.config import ModelConfig, preset
from cedar.config.weight_schema import weight_schema
from cedar.errors import UsageError
from cedar.planner.export import make_report
from cedar.planner.flows import Planner, Site
from cedar.planner.hardware import find_machine
from cedar.planner.request import Request
from cedar.planner.residency import CLASSES
from cedar.planner.sections import title
from cedar.planner.source import resolve_model
from cedar.planner.weights import expert_bytes, padded_width

REQUEST = Request(input_tokens=30, output_tokens=2)


def write_headers(folder: Path, config: ModelConfig, *, extra: int = 0, drop: str = "",
                  retyped: str = "") -> int:  # fmt: skip
    """A config and a safetensors file that ends after its header; returns the payload it promises."""
    header: dict[str, object] = {}
    end = 0
    for tensor in weight_schema(config):
        if tensor.name != drop:
            header[tensor.name] = {
                "dtype": "F16" if tensor.name == retyped else tensor.tag,
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
    if extra:
        header["extra.weight"] = {
            "dtype": "U8",
            "shape": [extra],
            "data_offsets": [end, end + extra],
        }
        end += extra
    raw = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    return end


@pytest.mark.parametrize("name", ["tiny", "nano", "tiny-article"])
def test_weights_are_the_sum_of_the_header_sizes_to_the_byte(name: str, tmp_path: Path) -> None:
    promised = write_headers(tmp_path, preset(name))
    model = resolve_model(str(tmp_path))
    ledger = Planner(model).plan(REQUEST, "ced+csa2").ledger
    assert ledger["weights.total_bytes"] == promised
    assert ledger.line("weights.resident_bytes").kind == "measured"
    assert model.tensors == sum(1 for _ in weight_schema(preset(name)))


def test_headers_and_schema_agree_class_by_class(tmp_path: Path) -> None:
    write_headers(tmp_path, preset("nano"))
    measured = Planner(resolve_model(str(tmp_path))).plan(REQUEST, "csa2").ledger
    counted = Planner(preset("nano")).plan(REQUEST, "csa2").ledger
    for name in CLASSES:
        assert measured[f"weights.{name}_bytes"] == counted[f"weights.{name}_bytes"]


def test_unknown_and_missing_tensors_are_named_and_still_counted(tmp_path: Path) -> None:
    promised = write_headers(tmp_path, preset("tiny"), extra=1_000, drop="norm.weight")
    model = resolve_model(str(tmp_path))
    assert model.unknown == ("extra.weight",)
    assert model.missing == ("norm.weight",)
    assert Planner(model).plan(REQUEST, "csa2").ledger["weights.total_bytes"] == promised


def test_the_report_says_what_the_files_lack_and_hold_otherwise(tmp_path: Path) -> None:
    write_headers(tmp_path, preset("tiny"), extra=1_000, drop="norm.weight", retyped="head.weight")
    report = make_report(Planner(resolve_model(str(tmp_path))), REQUEST, "csa2")
    text = "\n".join(title(report))
    assert "the files lack 1 tensor that the config asks for: norm.weight" in text
    assert "the files hold 1 tensor that the config does not ask for: extra.weight" in text
    assert "1 tensor in another dtype or shape than the config asks for: head.weight is F16" in text


def test_shards_without_an_index_are_read_together(tmp_path: Path) -> None:
    promised = write_headers(tmp_path, preset("tiny"))
    (tmp_path / "model.safetensors").rename(tmp_path / "part-1.safetensors")
    assert sum((resolve_model(str(tmp_path)).measured or {}).values()) == promised


def test_page_locked_tables_round_each_buffer_to_a_power_of_two() -> None:
    ledger = Planner(preset("v4.1-flash")).plan(REQUEST, "ced+csa2").ledger
    assert ledger["weights.engram_tables_bytes"] / 2**30 == pytest.approx(188.83, abs=0.01)
    assert ledger["engram.pinned_bytes"] == 264 * 2**30


def test_pinned_tables_need_a_host_that_holds_the_rounded_size() -> None:
    planner = Planner(preset("v4.1-flash"))
    machine = find_machine("8xh100")
    for host, pinned, fits in ((220, False, True), (220, True, False), (300, True, True)):
        roomy = type(machine)(**{**_fields(machine), "host_memory_bytes": host * 2**30})
        site = Site(roomy, {"engram_tables": "ram"}, pinned=pinned)
        assert planner.plan(REQUEST, "ced+csa2", site).fits is fits


def _fields(machine: object) -> dict[str, object]:
    return {name: getattr(machine, name) for name in type(machine).__dataclass_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
@pytest.mark.parametrize("alignment", [128, 256, 512])
def test_a_split_expert_is_planned_at_its_padded_width(ways: int, alignment: int) -> None:
    width = padded_width(2_304, ways, alignment)
    assert width % alignment == 0
    assert width * ways >= 2_304
    assert width - alignment < 2_304 / ways
    config = preset("v4.1-flash")
    values, scales = 3 * 5_120 * width // 2, 3 * 5_120 * width // 32
    assert expert_bytes(config, width) == values + scales


def test_eight_ways_at_128_columns_take_a_third_more_than_an_even_split() -> None:
    assert padded_width(2_304, 8, 128) / (2_304 / 8) == pytest.approx(4 / 3)
    planner = Planner(preset("v4.1-flash"))
    machine = find_machine("dgx-h200")
    plain, padded = (
        planner.plan(REQUEST, "ced+csa2", Site(machine, expert_alignment=alignment)).ledger
        for alignment in (32, 128)
    )
    assert 8 * plain["rank.routed_experts_bytes"] == plain["weights.routed_experts_bytes"]
    share = padded["rank.routed_experts_bytes"] / plain["rank.routed_experts_bytes"]
    assert share == pytest.approx(4 / 3)


def test_one_rank_holds_everything_and_eight_hold_at_least_an_eighth() -> None:
    planner = Planner(preset("v4.1-flash"))
    for name, ways in (("h200", 1), ("dgx-h200", 8)):
        ledger = planner.plan(REQUEST, "ced+csa2", Site(find_machine(name))).ledger
        for kind in CLASSES:
            whole, rank = ledger[f"weights.{kind}_bytes"], ledger[f"rank.{kind}_bytes"]
            assert rank == whole if ways == 1 else whole / 8 <= rank <= whole


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot share o_groups=8"):
        Planner(preset("v4.1-flash")).plan(REQUEST, "csa2", Site(find_machine("16xh200")))


def test_the_classes_add_up_to_the_checkpoint() -> None:
    config = preset("v4.1-flash")
    total = sum(tensor.nbytes for tensor in weight_schema(config))
    ledger = Planner(config).plan(REQUEST, "ced+csa2").ledger
    assert sum(ledger[f"weights.{name}_bytes"] for name in CLASSES) == total
    assert ledger["weights.total_bytes"] == total
