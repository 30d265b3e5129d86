"""The four flows (CED and CSA2 on or off) and adapters of borrowed rows: all run, cached equals
uncached, and each stores what its plan says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from exact_operators import with_weights
from sequences import assert_same_state, differences, global_rows, prefill, steps, tokens
from torch import Tensor

from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.engine.account import Account
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.random_weights import random_tensors
from cedar.errors import UsageError
from cedar.formats.rows import RowFormats

Exact = Callable[..., LoadedModel]
FLOWS = [(False, False), (True, False), (False, True), (True, True)]
PRESETS = [("tiny", 27), ("tiny-article", 26), ("tiny-40", 15)]


@pytest.mark.parametrize(("ced", "csa2"), FLOWS)
@pytest.mark.parametrize(("name", "length"), PRESETS)
def test_each_flow_runs_cached_as_uncached_and_stores_its_own_rows(
    exact: Exact, name: str, length: int, ced: bool, csa2: bool
) -> None:
    config = preset(name).variant(ced=ced, csa2=csa2)
    model = exact(config)
    ids = tokens(model, length + 3)
    oracle = model.score(ids)
    account = Account()
    logits, state = prefill(model, ids[:, :length], account=account)
    assert torch.equal(logits, oracle[:, length - 1])
    assert torch.equal(steps(model, ids[:, length:], state), oracle[:, length:])
    formats = RowFormats.of(config)
    assert state.kv_bytes() == formats.kv_bytes(config.plan, length + 3)
    assert state.window_bytes() == formats.window_bytes(config.plan)
    assert account.encode.layers == config.plan.num_encoder_layers
    assert account.project.layers == (len(config.plan.boundary_owners) if ced else 0)


@pytest.mark.parametrize("csa2", [False, True])
@pytest.mark.parametrize(("name", "length"), PRESETS[:2])
def test_the_decoder_may_be_skipped_in_ced_flows_only(
    exact: Exact, name: str, length: int, csa2: bool
) -> None:
    on = exact(preset(name).variant(ced=True, csa2=csa2))
    ids = tokens(on, length + 1)
    for mode in ("report", "cut", "exact"):
        account = Account()
        logits, state = prefill(on, ids[:, :length], decoder_prefill=mode, account=account)
        assert torch.isfinite(logits).all()
        assert account.replay.token_layers < length * len(on.plan.decoder)
        full_logits, full = prefill(on, ids[:, :length])
        assert differences(global_rows(state), global_rows(full)) == []
        if mode == "exact":
            assert torch.equal(logits, full_logits)
    off = exact(preset(name).variant(ced=False, csa2=csa2))
    with pytest.raises(UsageError, match="decoder layer 4 computes its KV rows from its own input"):
        prefill(off, ids, decoder_prefill="report")


def test_the_flows_are_four_different_models_of_one_body(exact: Exact) -> None:
    """They differ in the plan only: shared tensors have the same names and shapes."""
    shapes = []
    logits = []
    for ced, csa2 in FLOWS:
        config = preset("tiny").variant(ced=ced, csa2=csa2)
        model = exact(config)
        shapes.append({name: p.shape for name, p in model.net.named_parameters()})
        logits.append(prefill(model, tokens(model, 20))[0])
    for other in shapes[1:]:
        for name in shapes[0].keys() & other.keys():
            assert other[name] == shapes[0][name]
    assert shapes[0] == shapes[1]
    assert shapes[2] == shapes[3], "CED changes no tensor"
    assert not torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_ced_of_one_boundary_owner_at_the_cut_is_the_released_model(exact: Exact) -> None:
    """Layer 20's own input is the boundary: with sharing, both readings of it give one model."""
    weights = random_tensors(preset("tiny-40"), 0)
    ids = None
    results = []
    for ced in (False, True):
        model = with_weights(preset("tiny-40").variant(ced=ced, csa2=True), weights)
        ids = tokens(model, 12) if ids is None else ids
        results.append(prefill(model, ids))
    assert torch.equal(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])


def test_owners_of_one_boundary_project_it_each_with_their_own_weights(exact: Exact) -> None:
    model = exact("tiny-article")
    _, state = prefill(model, tokens(model, 24))
    rows = global_rows(state)
    assert [spec.layer_id for spec in model.plan.boundary_owners] == [4]
    wide = exact(preset("tiny-article").variant(ced=True, csa2=False))
    _, state = prefill(wide, tokens(wide, 24))
    mains = [state.pool.main[spec.layer_id][:6] for spec in wide.plan.boundary_owners]
    assert len(mains) == 4
    assert all(not torch.equal(mains[0], other) for other in mains[1:])
    assert rows.keys() == {"main 0", "index 0", "main 4", "index 4"}


# Adapters of borrowed rows.


def adapted(kind: str) -> ModelConfig:
    return replace(preset("tiny"), kv_adapter=kind, kv_adapter_rank=2 if kind == "lowrank" else 0)


def adapter_weights(config: ModelConfig, *, identity: bool) -> dict[str, Tensor]:
    """The weights of the plain model plus adapters, identity or random."""
    tensors = random_tensors(preset("tiny"), 0)
    generator = torch.Generator().manual_seed(5)
    for spec in config.plan.layers:
        name = f"layers.{spec.layer_id}.attn.kv_adapter"
        if spec.kv_adapter == "diag":
            noise = torch.randn(config.head_dim, generator=generator)
            tensors[f"{name}.scale"] = 1 + (0 if identity else 0.3) * noise
        elif spec.kv_adapter == "lowrank":
            shape = (config.kv_adapter_rank, config.head_dim)
            tensors[f"{name}.down"] = torch.randn(shape, generator=generator)
            up = 0.1 * torch.randn(shape[::-1], generator=generator)
            tensors[f"{name}.up"] = torch.zeros_like(up) if identity else up
    return tensors


@pytest.mark.parametrize("kind", ["diag", "lowrank"])
def test_an_identity_adapter_changes_nothing(exact: Exact, kind: str) -> None:
    """Up to the rounding of adding the two parts of the attention output apart."""
    config = adapted(kind)
    assert any(spec.kv_adapter == kind for spec in config.plan.layers)
    model = with_weights(config, adapter_weights(config, identity=True))
    plain = exact("tiny")
    ids = tokens(plain, 22)
    expected, _ = prefill(plain, ids)
    logits, _ = prefill(model, ids)
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["diag", "lowrank"])
def test_a_random_adapter_runs_cached_as_uncached(exact: Exact, kind: str) -> None:
    """Within float32 rounding: the map itself is one float32 product per row."""
    config = adapted(kind)
    model = with_weights(config, adapter_weights(config, identity=False))
    ids = tokens(model, 26)
    oracle = model.score(ids)
    logits, state = prefill(model, ids[:, :21])
    assert (logits - oracle[:, 20]).abs().max() < 1e-4
    assert (steps(model, ids[:, 21:], state) - oracle[:, 21:]).abs().max() < 1e-4
    chunked, _ = prefill(model, ids[:, :21], chunk_rows=4)
    assert (chunked - logits).abs().max() < 1e-4
    plain, _ = prefill(exact("tiny"), ids[:, :21])
    assert (plain - logits).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["diag", "lowrank"])
def test_an_adapter_maps_the_borrowed_rows_it_reads(exact: Exact, kind: str) -> None:
    """Folding the map into queries and outputs equals mapping every row before attention."""
    config = adapted(kind)
    model = with_weights(config, adapter_weights(config, identity=False))
    adapter = model.net.block(2).attn.kv_adapter
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(3, 2, config.head_dim, generator=generator)
    rows = torch.randn(5, config.head_dim, generator=generator)
    identity = torch.eye(config.head_dim)
    if kind == "diag":
        matrix = torch.diag(adapter.scale)
    else:
        matrix = identity + adapter.up @ adapter.down
    mapped = rows @ matrix.t()
    scores = torch.einsum("nhd,ed->nhe", adapter.to_queries(q), rows)
    assert torch.allclose(scores, torch.einsum("nhd,ed->nhe", q, mapped), atol=1e-4)
    weights = torch.softmax(scores, -1)
    folded = adapter.to_outputs(torch.einsum("nhe,ed->nhd", weights, rows))
    assert torch.allclose(folded, torch.einsum("nhe,ed->nhd", weights, mapped), atol=1e-4)


@pytest.mark.parametrize("kind", ["diag", "lowrank"])
def test_adapters_do_not_change_what_is_stored(exact: Exact, kind: str) -> None:
    config = adapted(kind)
    formats = RowFormats.of(config)
    assert formats.kv_bytes_per_token(config.plan) == formats.kv_bytes_per_token(
        preset("tiny").plan
    )
    model = with_weights(config, adapter_weights(config, identity=False))
    _, state = prefill(model, tokens(model, 9))
    assert set(state.pool.main) == {1, 3, 4}
