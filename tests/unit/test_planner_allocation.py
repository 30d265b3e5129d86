"""The ledger against the engine: bytes really allocated, rows and layers really run.

The planner may not import the engine, so this is where the two are held together: pools, rings and
open groups byte for byte, phases of real prefills and prefix hits row for row.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from cedar.bench.memory import PeakMemory
from cedar.cache.state import ModelState
from cedar.config import ModelConfig, preset
from cedar.engine.account import Account
from cedar.engine.loaded_model import LoadedModel
from cedar.kernels.backends import select_operators
from cedar.loading import from_config
from cedar.planner.flows import Planner
from cedar.planner.ledger import Ledger
from cedar.planner.request import (
    DECODER_PREFILL,
    ENCODER_REPLAY,
    FLOWS,
    DecoderPrefill,
    EncoderReplay,
    Flow,
    Request,
)

BLOCK = 4


def variant(config: ModelConfig, flow: Flow) -> ModelConfig:
    return config.variant(ced="ced" in flow.split("+"), csa2="csa2" in flow)


@cache
def model(name: str, flow: Flow) -> LoadedModel:
    return from_config(variant(preset(name), flow), ops=select_operators("reference"))


def ledger_of(name: str, flow: Flow, **fields: object) -> Ledger:
    request = Request(block_size=BLOCK, **fields)  # type: ignore[arg-type]
    return Planner(preset(name)).plan(request, flow).ledger


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", ["tiny", "tiny-article", "nano", "article-thin"])
@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (131, 3), (3_100, 2)])
def test_predicted_bytes_are_the_bytes_allocated(
    name: str, flow: Flow, tokens: int, batch: int
) -> None:
    config = variant(preset(name), flow)
    state = ModelState.contiguous(config, max_tokens=tokens + 1, batch=batch, block_size=BLOCK)
    ledger = ledger_of(name, flow, input_tokens=tokens, output_tokens=1, concurrency=batch)
    pool = [*state.pool.main.values(), *state.pool.index.values()]
    groups = [*state.open_kv.values(), *state.open_gate.values()]
    assert sum(buffer.nbytes for buffer in pool) == batch * ledger["kv_allocated_bytes"]
    assert state.rings.nbytes == batch * ledger["window_bytes"]
    assert sum(buffer.nbytes for buffer in groups) == batch * ledger["open_group_bytes"]


def check_phases(account: Account, ledger: Ledger) -> None:
    for name in ("encode", "project", "replay"):
        phase = getattr(account, name)
        assert phase.tokens == ledger[f"phases.{name}.tokens"], name
        assert phase.layers == ledger[f"phases.{name}.layers"], name
    assert account.encode.token_layers == ledger["encode_token_layers"]
    assert account.replay.token_layers == ledger["decoder_token_layers"]


def modes(flow: Flow) -> tuple[DecoderPrefill, ...]:
    return DECODER_PREFILL if "ced" in flow.split("+") else ("full",)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", ["tiny", "tiny-article"])
@pytest.mark.parametrize("prompt", [1, 8, 90])
def test_a_real_prefill_runs_the_rows_and_keeps_the_bytes_of_the_ledger(
    name: str, flow: Flow, prompt: int
) -> None:
    loaded = model(name, flow)
    ids = torch.arange(prompt).remainder(64).unsqueeze(0)
    for mode in modes(flow):
        account = Account()
        state = loaded.new_state(max_tokens=prompt + 3)
        loaded.prefill(ids, state, decoder_prefill=mode, account=account)
        for _ in range(3):
            loaded.step(torch.tensor([5]), state)
        ledger = ledger_of(name, flow, input_tokens=prompt, output_tokens=3, decoder_prefill=mode)
        check_phases(account, ledger)
        assert state.kv_bytes() == ledger["kv_bytes"]
        assert state.window_bytes() == ledger["window_bytes"]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("replay", ENCODER_REPLAY)
@pytest.mark.parametrize("cached", [180, 196, 4])
def test_a_real_prefix_hit_runs_the_rows_of_the_ledger(
    flow: Flow, replay: EncoderReplay, cached: int
) -> None:
    loaded = model("tiny", flow)
    ids = torch.arange(200).remainder(64).unsqueeze(0)
    first = loaded.new_state(max_tokens=200)
    loaded.prefill(ids[:, :cached], first, decoder_prefill="full")
    for mode in modes(flow):
        account = Account()
        hit = first.prefix(cached)
        loaded.prefill(
            ids[:, cached:], hit, prefix_ids=ids[:, :cached], decoder_prefill=mode,
            encoder_replay=replay, account=account,
        )  # fmt: skip
        ledger = ledger_of(
            "tiny", flow, input_tokens=200, output_tokens=1, hit_rate=cached / 200,
            decoder_prefill=mode, encoder_replay=replay,
        )  # fmt: skip
        assert ledger["cached_tokens"] == cached
        check_phases(account, ledger)


@pytest.mark.parametrize(("name", "prompt"), [("tiny", 1_500), ("nano", 900)])
def test_the_peak_of_a_real_run_stays_within_the_plan(name: str, prompt: int) -> None:
    loaded = model(name, "ced+csa2")
    ids = torch.arange(prompt).remainder(64).unsqueeze(0)
    with PeakMemory() as memory:
        state = loaded.new_state(max_tokens=prompt + 1)
        loaded.prefill(ids, state, decoder_prefill="report")
        loaded.step(torch.tensor([5]), state)
    ledger = ledger_of(name, "ced+csa2", input_tokens=prompt, output_tokens=1)
    planned = ledger["sequences_bytes"] + ledger["scratch.total_bytes"]
    assert memory.peak_bytes <= 1.02 * planned + ledger["allowance_bytes"]


def test_a_longer_tail_runs_the_rows_of_the_ledger() -> None:
    account = Account()
    loaded = model("tiny", "ced+csa2")
    state = loaded.new_state(max_tokens=91)
    ids = torch.arange(90).remainder(64).unsqueeze(0)
    loaded.prefill(ids, state, decoder_prefill="report", replay_windows=3, account=account)
    ledger = ledger_of("tiny", "ced+csa2", input_tokens=90, output_tokens=1, replay_windows=3)
    check_phases(account, ledger)
