"""The data of the ten figures, for every preset: layers add up to the ledger, nothing is invented."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from cedar.config import preset_names
from cedar.errors import RequestError
from cedar.page.figures import DEFAULT_MODELS, NOTES, page_data
from cedar.planner.expression import evaluate
from cedar.planner.flows import Planner
from cedar.planner.ledger import Ledger
from cedar.planner.quoted import differences
from cedar.planner.request import FLOWS, Flow, Request
from cedar.planner.source import resolve_model

REQUEST = Request(input_tokens=300, output_tokens=20)


@cache
def planner(name: str) -> Planner:
    return Planner(resolve_model(f"preset:{name}"))


@cache
def data(name: str) -> dict[str, Any]:
    """The page's data, through JSON as the page reads it."""
    made = page_data([planner(name)], REQUEST, "ced+csa2")
    parsed = json.loads(json.dumps(made))
    assert isinstance(parsed, dict)
    return parsed


def ledger(name: str, flow: Flow) -> Ledger:
    return planner(name).plan(REQUEST, flow).ledger


def numbers(name: str, flow: Flow, formula: str) -> list[float]:
    """One named number of every layer of a flow."""
    document, lines = data(name), ledger(name, flow)
    layers = document["models"][0]["flows"][flow]["layers"]
    return [evaluate(document["formulas"][layer["formulas"]][formula], lines) for layer in layers]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", preset_names())
def test_what_layers_run_and_store_adds_up_to_the_ledger(name: str, flow: Flow) -> None:
    lines = ledger(name, flow)
    decoder = len(planner(name).config.plan.decoder)

    def total(formula: str) -> float:
        return sum(numbers(name, flow, formula))

    assert total("encode") == lines["encode_token_layers"]
    assert total("replay") == lines["decoder_token_layers"]
    assert total("replay_queries") == lines["decoder_query_layers"]
    assert total("project") == lines["phases.project.tokens"] * lines["phases.project.layers"]
    assert total("decode") == lines["decode_token_layers"]
    assert total("kv_bytes") == lines["kv_bytes"]
    assert total("kv_bytes_per_token") == pytest.approx(lines["kv_bytes_per_token"], rel=1e-12)
    assert total("window_bytes") == lines["window_bytes"]
    prompt = lines.value_at("kv_bytes", {"output_tokens": 0})
    assert total("prompt_kv_bytes") == prompt
    assert numbers(name, flow, "replay").count(0) == len(planner(name).config.plan) - decoder


@pytest.mark.parametrize("flow", FLOWS)
def test_the_last_step_reads_and_scores_what_the_ledger_adds_for_one_more_token(flow: Flow) -> None:
    name = "v4.1-flash"
    one_less = {"output_tokens": REQUEST.output_tokens - 1}
    lines = ledger(name, flow)
    for formula, line in (("read_window", "window"), ("read_selected", "selected"),
                          ("scored", "scored")):  # fmt: skip
        line = f"entries.decode.{line}"
        assert sum(numbers(name, flow, formula)) == lines[line] - lines.value_at(line, one_less)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", preset_names())
def test_layers_are_those_of_the_flows_plan(name: str, flow: Flow) -> None:
    layers = data(name)["models"][0]["flows"][flow]["layers"]
    plan = planner(name).plan(REQUEST, flow).config.plan
    assert len(layers) == len(plan)
    for layer, spec in zip(layers, plan.layers, strict=True):
        assert layer["id"] == spec.layer_id
        for key in ("side", "role", "kv_owner", "topk_owner", "kv_input", "candidate",
                    "kv_adapter", "has_engram"):  # fmt: skip
            assert layer[key] == getattr(spec, key)
        assert layer["ratio"] == spec.compress_ratio


@pytest.mark.parametrize("name", ["article", "v4.1-flash", "nano"])
def test_programs_give_the_numbers_of_any_request(name: str) -> None:
    document = data(name)
    for flow in FLOWS:
        program = document["models"][0]["flows"][flow]["program"]
        values: dict[str, float] = {}
        for line in (document["lines"][position] for position in program):
            given = getattr(REQUEST, line["name"], line.get("value"))
            values[line["name"]] = evaluate(line["formula"], values) if "formula" in line else given
        assert values == dict(ledger(name, flow))


def test_lines_and_formulas_stand_once() -> None:
    document = page_data([Planner(resolve_model(m)) for m in DEFAULT_MODELS], REQUEST, "none")
    for key in ("lines", "formulas"):
        texts = [json.dumps(value, sort_keys=True) for value in document[key]]
        assert len(texts) == len(set(texts))
    assert len(document["lines"]) < 1000


def test_a_flow_the_model_cannot_run_carries_the_reason_instead_of_numbers(tmp_path: Any) -> None:
    config = planner("v4.1-flash").config.to_dict()
    config["text_config"]["engram_layer_ids"] = [1, 30]
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = page_data([Planner(resolve_model(str(tmp_path)))], REQUEST, "csa2")
    flows = made["models"][0]["flows"]
    assert "layer 30 has an Engram" in flows["ced"]["unavailable"]
    assert set(flows["ced+csa2"]) == {"unavailable"}
    assert len(flows["csa2"]["layers"]) == 40


def test_the_first_model_must_have_room_for_the_request() -> None:
    long = Request(input_tokens=4_000, output_tokens=97)
    with pytest.raises(RequestError, match="allowed at most 4,096"):
        page_data([planner("tiny"), planner("nano")], long, "none")
    page_data([planner("nano"), planner("tiny")], long, "none")  # the page says it when chosen


def test_every_difference_of_article_and_release_has_its_figures() -> None:
    assert set(NOTES) == {difference.topic for difference in differences("release")}
    assert all(1 <= figure <= 10 for figures in NOTES.values() for figure in figures)
    for name, expected in (("article", len(NOTES)), ("v4.1-flash", len(NOTES)), ("nano", 0)):
        assert len(data(name)["models"][0]["differences"]) == expected
