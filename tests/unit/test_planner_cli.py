"""`cedar plan` from the outside: JSON keys, text, exit codes, and messages for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cedar.cli.plan import plan
from cedar.config import preset
from cedar.errors import CedarError, ConfigError, DoesNotFitError, RequestError, UsageError

SMALL = ("--machine", "none", "--input-tokens", "300", "--output-tokens", "20")


def run(*arguments: str) -> str:
    """Standard output of `cedar plan ARGUMENTS`; errors propagate as the entry point sees them."""
    result = CliRunner().invoke(plan, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def document(*arguments: str) -> dict[str, Any]:
    parsed = json.loads(run(*arguments, "--json"))
    assert isinstance(parsed, dict)
    return parsed


def test_the_json_document_has_the_published_keys() -> None:
    doc = document("preset:article", "--machine", "none")
    assert (doc["schema"], doc["schema_version"]) == ("cedar.plan", 1)
    assert (doc["request"]["input_tokens"], doc["request"]["output_tokens"]) == (30_000, 1_000)
    assert list(doc["flows"]) == ["none", "ced", "csa2", "ced+csa2"]
    for flow in doc["flows"].values():
        for key in ("prefill_activation", "activated_prefill", "activated_decode", "kv_bytes",
                    "kv_bytes_per_token", "window_bytes", "persisted_bytes"):  # fmt: skip
            assert isinstance(flow[key], (int, float))
        assert isinstance(flow["quoted"], dict)
    both = doc["flows"]["ced+csa2"]
    assert both["prefill_activation"] == 240_000
    assert both["kv_bytes"] == 27_590_000
    assert both["quoted"]["persisted_bytes"] == 13_795_000


def test_a_model_that_nobody_printed_figures_for_quotes_none() -> None:
    doc = document("preset:tiny", *SMALL)
    assert all(flow["quoted"] == {} for flow in doc["flows"].values())
    assert doc["differences"] == []
    assert doc["machine"] is None


def test_json_and_text_show_the_same_numbers() -> None:
    text = run("preset:article", "--machine", "dgx-h200")
    doc = document("preset:article", "--machine", "dgx-h200")
    for flow in doc["flows"].values():
        assert f"{flow['kv_bytes'] / 1e6:,.2f} MB" in text
        assert f"{flow['kv_bytes_per_token']:,}" in text
    assert "13.8 MB" in text
    assert "110.4 MB" in text
    assert f"{doc['flows']['ced+csa2']['fit']['largest_concurrency']:,} at this context" in text


def test_markdown_holds_a_table_for_each_section() -> None:
    text = run("nano", *SMALL, "--format", "markdown")
    assert text.count("## ") >= 4
    assert "| KV cache |" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


def test_explain_prints_every_formula_with_inputs_and_source() -> None:
    text = run("nano", *SMALL, "--explain")
    for part in ("kv_bytes =", "[derived]", "with rows.global_bytes", "source:"):
        assert part in text
    doc = document("nano", *SMALL, "--explain")
    lines = {line["name"]: line for line in doc["flows"]["ced"]["ledger"]}
    assert lines["kv_bytes"]["inputs"]["total_tokens"] == 320


def test_one_flow_can_be_asked_for() -> None:
    doc = document("nano", *SMALL, "--flow", "csa2")
    assert list(doc["flows"]) == ["csa2"]
    assert doc["ced_modes"] == {}


def test_the_assumed_hit_rate_is_stated_and_changes_the_work() -> None:
    cold = document("preset:article", "--machine", "none")
    warm = document("preset:article", "--machine", "none", "--hit-rate", "90%")
    assert "assumed prefix hit rate 90%" in run("nano", *SMALL, "--hit-rate", "0.9")
    assert (cold["request"]["hit_rate"], warm["request"]["hit_rate"]) == (0.0, 0.9)
    flops = [doc["flows"]["ced+csa2"]["flops"]["prefill"]["total"] for doc in (cold, warm)]
    assert flops[1] < 0.2 * flops[0]


def test_a_plan_that_does_not_fit_exits_3_only_when_asked() -> None:
    arguments = ("preset:v4.1-flash", "--machine", "h200")
    assert "does not fit" in run(*arguments)
    with pytest.raises(DoesNotFitError, match="no room for routed_experts") as refused:
        run(*arguments, "--require-fit")
    assert refused.value.exit_code == 3


def test_a_budget_one_megabyte_below_the_plan_is_refused_and_at_the_plan_fits() -> None:
    arguments = ["nano", "--input-tokens", "300", "--bandwidth", "40GB/s", "--flops", "1TFLOP/s"]
    doc = document(*arguments, "--memory", "64GB")
    needed = int(doc["flows"]["ced+csa2"]["fit"]["required_bytes"])
    run(*arguments, "--memory", f"{needed}B", "--require-fit")
    with pytest.raises(DoesNotFitError, match=r"1\.000 MB short"):
        run(*arguments, "--memory", f"{needed - 10**6}B", "--require-fit")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--input-tokens", "0", "at least 1"),
        ("--input-tokens", "-5", "at least 1"),
        ("--input-tokens", "1.5", "a whole number is needed"),
        ("--input-tokens", "many", "not a number"),
        ("--input-tokens", "3Z", "unknown suffix"),
        ("--output-tokens", "0", "at least 1"),
        ("--concurrency", "0", "at least 1"),
        ("--tokens-per-turn", "0.5", "a whole number is needed"),
        ("--hit-rate", "1.1", "allowed 0 to 1"),
        ("--memory", "80G", "write GB (powers of 1000) or GiB"),
        ("--memory", "-1GB", "at least 1"),
        ("--bandwidth", "fast", "not a number"),
        ("--flops", "10W", "unknown unit"),
        ("--replay-overhead-ms", "-1", "between 0"),
    ],
)
def test_a_bad_value_names_the_option_and_what_is_allowed(
    option: str, value: str, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        run("nano", "--machine", "none", option, value)
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"{option} {value!r}")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(("option", "value"), [("--flow", "both"), ("--decoder-prefill", "half")])
def test_a_word_that_is_no_choice_is_refused_with_the_choices(option: str, value: str) -> None:
    with pytest.raises(click.BadParameter, match="is not one of") as refused:
        run("nano", "--machine", "none", option, value)
    assert option in refused.value.format_message()


def test_a_default_that_no_longer_fits_is_not_called_a_choice() -> None:
    with pytest.raises(
        RequestError, match=r"5,000,000,000 input \+ 1,000 output tokens = .* exceed"
    ):
        run("nano", "--machine", "none", "--input-tokens", "5e9")


@pytest.mark.parametrize("name", ["1000xh200", "0xh200"])
def test_a_count_of_machines_out_of_range_is_refused_with_the_range(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.* a count of 1 to 999 before an accelerator"):
        run("nano", "--machine", name)


@pytest.mark.parametrize(
    ("arguments", "message", "kind"),
    [
        (("preset:article", "--input-tokens", "2000000"), "at most 1,048,576", RequestError),
        (("nano", "--input-tokens", "99999999999999999999"), "at most 1,048,576", RequestError),
        (("preset:tiny", "--input-tokens", "30k"), "at most 4,096", RequestError),
        (("nano", "--block-size", "129"), "multiple of 2", RequestError),
        (
            ("nano", "--decoder-prefill", "exact", "--replay-windows", "2"),
            "no effect",
            RequestError,
        ),
        (("preset:v9",), "unknown preset 'v9'; allowed: v4.1-flash", UsageError),
        (("/no/such/model",), "preset:NAME with NAME one of", UsageError),
        (("nano", "--machine", "abacus"), "unknown machine 'abacus'", UsageError),
        (("nano", "--machine", "none", "--require-fit"), "needs a machine", UsageError),
        (("nano", "--machine", "none", "--memory", "1GB"), "leave one", UsageError),
        (("nano", "--memory", "1GB"), "give all three", UsageError),
        (("nano", "--machine", "epyc-9654x2", "--pinned"), "needs an accelerator", UsageError),
    ],
)
def test_what_cannot_be_planned_says_what_is_allowed(
    arguments: tuple[str, ...], message: str, kind: type[CedarError]
) -> None:
    machine = () if "--machine" in arguments or "--memory" in arguments else ("--machine", "none")
    with pytest.raises(kind) as refused:
        run(*arguments, *machine)
    assert message in str(refused.value)
    assert refused.value.exit_code == 2


def test_a_config_with_a_missing_list_names_it(tmp_path: Path) -> None:
    config = preset("tiny").to_dict()
    del config["text_config"]["kv_source_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="kv_source_layer_ids is missing") as refused:
        run(str(tmp_path), *SMALL)
    assert refused.value.exit_code == 4


def test_a_plan_that_cannot_run_ced_says_why_and_plans_the_rest(tmp_path: Path) -> None:
    config = preset("tiny").to_dict()
    config["text_config"]["num_encoder_layers"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    doc = document(str(tmp_path), *SMALL)
    assert "no decoder layers" in doc["flows"]["ced"]["unavailable"]
    assert doc["primary_flow"] == "csa2"
    assert doc["flows"]["none"]["kv_bytes"] > 0
    assert "flow ced is not possible" in run(str(tmp_path), *SMALL)
    with pytest.raises(UsageError, match="possible flows: none, csa2"):
        run(str(tmp_path), *SMALL, "--flow", "ced")


def test_config_json_alone_plans_as_the_directory_does(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(preset("nano").to_dict()))
    by_file, by_folder = (document(str(path), *SMALL) for path in (file, tmp_path))
    assert by_file["flows"] == by_folder["flows"]
    assert by_file["model"]["weights_from"] == "schema"


def test_planning_imports_no_torch_and_prints_one_json_document() -> None:
    code = (
        "import sys\n"
        "from cedar.cli.main import cedar\n"
        f"cedar(['plan', 'nano', *{SMALL!r}, '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "cedar.plan"
    assert done.stderr == ""


def test_the_default_request_shrinks_to_the_context_and_says_so() -> None:
    result = CliRunner().invoke(plan, ["preset:tiny", "--machine", "none", "--json"])
    request = json.loads(result.stdout)["request"]
    assert (request["input_tokens"], request["output_tokens"]) == (3_096, 1_000)
    assert "note: 3,096 input + 1,000 output tokens" in result.stderr
    assert "--input-tokens" in result.stderr


def test_a_fit_without_a_machine_is_refused_before_anything_is_printed() -> None:
    result = CliRunner().invoke(plan, ["nano", "--machine", "none", "--require-fit"])
    assert isinstance(result.exception, UsageError)
    assert result.stdout == ""
