"""Recorded bounded replays, prefix hits and runs without selection."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bounds import MODELS, REPLAYED, assert_logits, assert_logits_bf16, assert_logits_f32
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.engine.loaded_model import LoadedModel
from cedar.formats.codec import decode_rows
from cedar.loading import assign, build_net

Recording = Callable[[str, str], dict[str, Tensor]]
Loader = Callable[..., LoadedModel]
DTYPES = ("float32", "bfloat16")


def compare(directory: Path, dtype: str, name: str, actual: Tensor, expected: Tensor) -> None:
    if dtype == "float32":
        assert_logits_f32(directory.name.split("-")[0], actual, expected)
    else:
        # Replays are as noisy as the plain run of the same model: use its measured noise.
        noise = "decodeA.logits" if name.endswith(".decode") else "prefill.129.tail"
        assert_logits_bf16(directory, name, actual, expected, noise_of=noise)


def check_rings(dtype: str, state: ModelState, golden: dict[str, Tensor], prefix: str) -> None:
    """Every recorded ring of a case, decoded. Equal in float32; in bfloat16 close on the whole."""
    names = [name for name in golden if name.startswith(f"{prefix}.window.")]
    assert names
    for name in names:
        layer = int(name.rsplit(".", 1)[1])
        values = decode_rows(state.rings[layer, 0], state.formats.window)
        expected = golden[name][0].float()
        if dtype == "float32":
            off = (values - expected).abs() > 1e-6 * expected.abs().max()
            assert off.float().mean() <= 0.001, name
        else:
            error = (values - expected).square().mean().sqrt()
            assert error <= 0.35 * expected.square().mean().sqrt(), name


REPLAY = re.compile(r"replay\.T(\d+)\.R(\d+)")
HIT = re.compile(r"prefix_hit\.P(\d+)_S(\d+)\.R(\d+)")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", REPLAYED)
def test_decoder_replays_match_with_their_rings_and_following_steps(
    load_recorded: Loader, recorded: Recording, model_directory: Callable[[str], Path], model: str,
    dtype: str,
) -> None:  # fmt: skip
    """Every recorded prompt and number of replayed rows; at least nine of them."""
    loaded, golden, directory = (
        load_recorded(model, dtype),
        recorded(model, dtype),
        model_directory(model),
    )
    tokens, window = golden["tokens"].long(), loaded.plan.sliding_window
    cases = [(name, REPLAY.fullmatch(name)) for name in sorted(golden)]
    found = [(name, int(m[1]), int(m[2])) for name, m in cases if m]
    assert len(found) >= 9
    for name, length, rows in found:
        assert rows % window == 0
        state = loaded.new_state(length + 6)
        logits = loaded.prefill(
            tokens[:, :length], state, decoder_prefill="report", replay_windows=rows // window
        )
        compare(directory, dtype, name, logits, golden[name])
        if f"{name}.window.{len(loaded.plan) - 1}" in golden:
            check_rings(dtype, state, golden, name)
        if f"{name}.decode" in golden:
            steps = [loaded.step(tokens[:, length + j], state) for j in range(6)]
            compare(
                directory, dtype, f"{name}.decode", torch.stack(steps, 1), golden[f"{name}.decode"]
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", REPLAYED)
def test_prefix_hits_match_with_their_rings_and_following_steps(
    load_recorded: Loader, recorded: Recording, model_directory: Callable[[str], Path], model: str,
    dtype: str,
) -> None:  # fmt: skip
    """Every recorded prefix, suffix and number of replayed encoder rows; at least eleven of them."""
    loaded, golden, directory = (
        load_recorded(model, dtype),
        recorded(model, dtype),
        model_directory(model),
    )
    tokens, window = golden["tokens"].long(), loaded.plan.sliding_window
    cases = [(name, HIT.fullmatch(name)) for name in sorted(golden)]
    found = [(name, *(int(part) for part in m.groups())) for name, m in cases if m]
    assert len(found) >= 11
    prefixes: dict[int, ModelState] = {}
    for name, cached, new, rows in found:
        if cached not in prefixes:
            prefixes[cached] = loaded.new_state(256)
            loaded.prefill(tokens[:, :cached], prefixes[cached])
        hit = prefixes[cached].prefix(cached)
        total = cached + new
        logits = loaded.prefill(
            tokens[:, cached:total], hit, prefix_ids=tokens[:, :cached], encoder_replay="bounded",
            encoder_replay_windows=rows // window, decoder_prefill="report",
        )  # fmt: skip
        compare(directory, dtype, name, logits, golden[name])
        if f"{name}.window.0" in golden:
            check_rings(dtype, hit, golden, name)
        if f"{name}.decode" in golden:
            steps = [loaded.step(tokens[:, total + j], hit) for j in range(6)]
            compare(
                directory, dtype, f"{name}.decode", torch.stack(steps, 1), golden[f"{name}.decode"]
            )


@pytest.mark.parametrize("model", REPLAYED)
def test_recorded_exact_runs_of_the_replay_prompts_match(
    load_recorded: Loader, recorded: Recording, model: str
) -> None:
    loaded, golden = load_recorded(model, "float32"), recorded(model, "float32")
    full = [name for name in golden if name.endswith(".full")]
    assert len(full) == 7
    for name in full:
        length = sum(int(n) for n in re.findall(r"[TPS](\d+)", name))
        ids = golden["tokens"][:, :length].long()
        exact = loaded.prefill(ids, loaded.new_state(length), decoder_prefill="exact")
        assert_logits_f32(model, exact, golden[name])


def without_selection(model: LoadedModel) -> LoadedModel:
    """The same weights, but every query attends to every compressed row."""
    config = replace(model.config, index_topk=4096, candidate_topk_blocks=4096)
    net = build_net(config, model.ops, model.net.dtype)
    assign(net, dict(model.net.state_dict()))
    return LoadedModel(net, engram=model.forward.engram)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_runs_without_selection_match(
    load_recorded: Loader, recorded: Recording, model_directory: Callable[[str], Path], model: str,
    dtype: str,
) -> None:  # fmt: skip
    """Without flips of the selection bfloat16 has tight bounds end to end."""
    loaded = without_selection(load_recorded(model, dtype))
    golden, directory = recorded(model, dtype), model_directory(model)
    tokens = golden["tokens"].long()
    expected = golden["nosel.129.tail"]
    logits = loaded.score(tokens[:, :129])[:, -expected.shape[1] :]
    assert_logits(directory, dtype, "nosel.129.tail", logits, expected)
    # The recording holds the last steps of 48 that follow a prompt of 37 tokens.
    expected = golden["nosel.decodeA"]
    first = 85 - expected.shape[1]
    state = loaded.new_state(85)
    loaded.prefill(tokens[:, :first], state)
    steps = [loaded.step(tokens[:, p], state) for p in range(first, 85)]
    assert_logits(directory, dtype, "nosel.decodeA", torch.stack(steps, 1), expected)
