"""`cedar compare` from the outside: what it ran and stored, beside the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from cedar.bench.record import environment
from cedar.cli.compare import compare
from cedar.config.model_config import ModelConfig
from cedar.engine.loaded_model import LoadedModel
from cedar.errors import RequestError, UsageError
from cedar.loading import from_config

VECTORS = Path(__file__).parent.parent / "vectors"


def run(*arguments: object) -> str:
    """Standard output of `cedar compare ARGUMENTS`; errors propagate as the entry point sees them."""
    result = CliRunner().invoke(compare, [str(a) for a in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """Four flows of the small article plan: 300 tokens in, 20 out."""
    arguments = ("preset:tiny-article", "--input-tokens", 300, "--output-tokens", 20, "--json")
    document: dict[str, Any] = json.loads(run(*arguments))
    return document


def test_measured_cache_bytes_equal_the_ledger_in_every_flow(record: dict[str, Any]) -> None:
    assert list(record["flows"]) == ["none", "ced", "csa2", "ced+csa2"]
    for flow in record["flows"].values():
        assert flow["measured"]["kv_bytes"] == flow["kv_bytes"] > 0
        assert flow["measured"]["window_bytes"] == flow["window_bytes"] > 0


def test_sharing_rows_divides_them_by_four(record: dict[str, Any]) -> None:
    kv = {name: flow["measured"]["kv_bytes"] for name, flow in record["flows"].items()}
    assert kv["none"] == kv["ced"] == 4 * kv["csa2"] == 4 * kv["ced+csa2"]


def test_persisted_bytes_are_those_of_the_complete_blocks_in_a_real_store(
    record: dict[str, Any],
) -> None:
    for flow in record["flows"].values():
        measured = flow["measured"]
        assert measured["persisted_bytes"] == flow["store"]["complete_block_bytes"] > 0
        assert measured["persisted_file_bytes"] > measured["persisted_bytes"]


def test_with_ced_the_decoder_reads_one_window_of_the_prompt(record: dict[str, Any]) -> None:
    for name, flow in record["flows"].items():
        measured = flow["measured"]
        assert measured["encode_token_layers"] == flow["encode_token_layers"]
        assert measured["decoder_token_layers"] == flow["decoder_token_layers"]
        assert measured["decode_token_layers"] == flow["decode_token_layers"]
        assert (measured["decoder_prefill"] == "report") == name.startswith("ced")


def test_a_trained_model_runs_the_flows_its_weights_support_and_its_text_comes_out(
    tmp_path: Path,
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("It was a bright morning, and", encoding="utf-8")
    table = run("nano", "--prompt-file", prompt, "--output-tokens", 8)
    wrote = [line for line in table.splitlines() if " wrote: " in line]
    assert [line.split(" wrote: ")[0] for line in wrote] == ["csa2", "ced+csa2"]
    assert all(len(line.split(" wrote: ")[1]) > 8 for line in wrote)
    assert "none: not run, its weights lack" in table


def test_options_reach_random_models_and_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(config: ModelConfig, **options: Any) -> LoadedModel:
        built.append((options["dtype"], options["index_key_rule"]))
        return from_config(config, **options)

    monkeypatch.setattr("cedar.loading.from_config", build)
    sizes = ("preset:tiny-article", "--input-tokens", 5, "--output-tokens", 1, "--json")
    other = json.loads(run(*sizes, "--dtype", "float32", "--index-key-rule", "as_shipped"))
    assert (other["dtype"], other["index_key_rule"]) == ("float32", "as_shipped")
    assert built == [(torch.float32, "as_shipped")] * 4


def test_the_record_names_the_processor(record: dict[str, Any]) -> None:
    machine, known = record["machine_measured"], environment()
    assert machine["processor"] == known["processor"]
    assert machine["commit"] == known["commit"]


def test_every_flow_is_warmed_up_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, prefill = [], LoadedModel.prefill

    def watched(model: LoadedModel, *arguments: Any, **options: Any) -> torch.Tensor:
        measured.append("account" in options)
        return prefill(model, *arguments, **options)

    monkeypatch.setattr(LoadedModel, "prefill", watched)
    run("preset:tiny-article", "--input-tokens", 5, "--output-tokens", 1)
    assert measured == [False, True] * 4


def test_no_ratio_is_printed_for_flows_that_ran_the_same_token_layers() -> None:
    short = run("preset:tiny-article", "--input-tokens", 5, "--output-tokens", 1)
    assert "prefill time ced / none: no ratio, both ran the same" in short
    assert "labels: token-layers, times" in short


def test_a_page_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for page in (tmp_path, tmp_path / "file" / "page.html"):
        result = CliRunner().invoke(
            compare, ["preset:tiny-article", "--input-tokens", "5", "--html", str(page)],
            standalone_mode=False,
        )  # fmt: skip
        assert isinstance(result.exception, UsageError)
        assert "cannot write" in str(result.exception)
        assert "building" not in result.stderr


def test_a_flow_the_plan_cannot_run_is_reported_with_its_reason() -> None:
    sizes = ("--input-tokens", 20, "--output-tokens", 2)
    table = run(VECTORS / "m3-tiny-engram", *sizes)
    assert "ced+csa2: not run, layer " in table
    assert "has an Engram at or above" in table
    flows = json.loads(run(VECTORS / "m3-tiny-engram", *sizes, "--json"))["flows"]
    assert "measured" in flows["csa2"]
    assert "has an Engram at or above" in flows["ced+csa2"]["not_measured"]


def test_a_directory_without_a_tokenizer_is_compared_on_random_ids() -> None:
    table = run(VECTORS / "m1-tiny-text-bf16", "--input-tokens", 20, "--output-tokens", 2)
    assert " wrote: " not in table
    with pytest.raises(UsageError, match="needs a model with a tokenizer"):
        run(VECTORS / "m1-tiny-text-bf16", "--prompt-file", Path(__file__))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "exactly one of --input-tokens"),
        (("--input-tokens", 0), "--input-tokens '0' must be at least 1"),
        (("--input-tokens", 5, "--output-tokens", 0), "--output-tokens '0' must be at least 1"),
        (("--prompt-file", "no-such-file"), "needs a model with a tokenizer"),
    ],
)
def test_bad_sizes_are_refused_before_a_model_is_built(
    arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises((UsageError, click.BadParameter)) as refused:
        run("preset:tiny-article", *arguments)
    assert message in str(refused.value)


def test_sizes_are_written_as_for_the_planner() -> None:
    with pytest.raises(RequestError, match="30,000 input"):
        run("preset:tiny-article", "--input-tokens", "30k")
