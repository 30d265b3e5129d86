"""Pins the fast training pass to the model's own forward pass: values, gradients, masks, detaching."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cedar.config.presets import preset
from cedar.formats import codec
from cedar.kernels.reference import ReferenceOperators
from cedar.model.causal_lm import CausalLM
from cedar.model.dense_rows import DenseRows
from cedar.training import rounding
from cedar.training.forward import hidden_rows
from cedar.training.initialise import initialise
from cedar.training.kernels import Kernels
from cedar.training.losses import chunked_cross_entropy
from cedar.training.operators import TrainingOperators
from cedar.training.quantiser import WeightQuantiser, packed_weights
from cedar.training.rows import Phase, TrainingRows

LENGTH = 24


def _model(plan: str = "tiny") -> tuple[CausalLM, Kernels]:
    kernels = Kernels(compiled=False)
    model = CausalLM(preset(plan), TrainingOperators(kernels), torch.float32)
    initialise(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "hc_" not in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(1))
    return model, kernels


def _rows(model: CausalLM, kernels: Kernels, phase: Phase) -> TrainingRows:
    return TrainingRows(
        model.plan, batch=2, length=LENGTH, scale=model.config.head_dim**-0.5, phase=phase,
        kernels=kernels, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def _reference_twin(model: CausalLM) -> CausalLM:
    twin = CausalLM(model.config, ReferenceOperators(), torch.float32)
    twin.load_state_dict(model.state_dict())
    return twin


def _ids() -> torch.Tensor:
    return torch.randint(0, 64, (2, LENGTH + 1), generator=torch.manual_seed(7))


@pytest.mark.parametrize("plan", ["tiny", "tiny-article"])
def test_the_quantised_sparse_pass_gives_the_logits_of_the_uncached_model(plan: str) -> None:
    model, kernels = _model(plan)
    ids = _ids()[:, :-1]
    hidden = hidden_rows(
        model, ids, _rows(model, kernels, Phase(sparse=True, quantise=True)), kernels
    )
    twin = _reference_twin(model)
    rows = DenseRows(model.plan, batch=2, length=LENGTH, scale=model.config.head_dim**-0.5)
    expected = twin.logits(twin.forward_dense(ids, rows, None))
    torch.testing.assert_close(hidden @ model.head.weight.t(), expected, atol=2e-4, rtol=1e-3)


class _PlainRows(TrainingRows):
    """Dense phase through the oracle's attention, so that autograd differentiates plain torch."""

    def attend(self, spec, spans, window, queries, q, sink, q_selected):  # type: ignore[no-untyped-def]
        return DenseRows.attend(self, spec, spans, window, queries, q, sink, q_selected)


def test_gradients_of_the_fast_pass_equal_autograd_through_the_reference_operators() -> None:
    model, kernels = _model()
    ids = _ids()
    rows = _rows(model, kernels, Phase(index_queries=0))
    hidden = hidden_rows(model, ids[:, :-1], rows, kernels)
    loss = chunked_cross_entropy(hidden, model.head.weight, ids[:, 1:].flatten(), kernels)
    loss.backward()  # type: ignore[no-untyped-call]
    twin = _reference_twin(model)
    plain = _PlainRows(
        model.plan, batch=2, length=LENGTH, scale=model.config.head_dim**-0.5,
        phase=Phase(index_queries=0), kernels=kernels, generator=torch.Generator(),
    )  # fmt: skip
    logits = twin.logits(twin.forward_dense(ids[:, :-1], plain, None))
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected)
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None, name
        elif parameter.requires_grad:
            other = theirs[name].grad
            assert (parameter.grad is None) == (other is None), name
            if other is not None:
                torch.testing.assert_close(parameter.grad, other, atol=2e-6, rtol=2e-3, msg=name)


def test_the_index_loss_reaches_the_index_branch_and_nothing_else() -> None:
    model, kernels = _model()
    rows = _rows(model, kernels, Phase(index_queries=8))
    hidden_rows(model, _ids()[:, :-1], rows, kernels)
    assert len(rows.losses) == len({spec.topk_owner for spec in model.plan.layers} - {None})
    torch.stack(rows.losses).mean().backward()  # type: ignore[no-untyped-call]
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    branch = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert touched == branch


@pytest.mark.parametrize("magnitude", [1e-6, 1e-2, 1.0, 300.0])
def test_rounding_by_arithmetic_equals_the_codec_bit_for_bit(magnitude: float) -> None:
    x = torch.randn(96, 64, generator=torch.manual_seed(0)) * magnitude
    x[0] = 0
    fp4, fp8 = codec.encode_fp4_weight(x), codec.encode_fp8_weight(x)
    assert torch.equal(rounding.fake_fp4(x), codec.decode_fp4_weight(fp4.codes, fp4.scales))
    assert torch.equal(rounding.fake_fp8_tiles(x), codec.decode_fp8_weight(fp8.codes, fp8.scales))
    for rows in (x, x.bfloat16()):
        assert torch.equal(rounding.fake_act(rows), codec.fake_quantise(rows, "window"))
        assert torch.equal(rounding.fake_fp4(rows), codec.fake_quantise(rows, "index"))


def test_every_exact_tie_of_the_four_bit_grid_rounds_to_the_even_code() -> None:
    x = torch.arange(-6.5, 6.5, 0.125)
    expected = codec.e2m1_decode(codec.e2m1_encode(x.clamp(-6, 6)))
    assert torch.equal(rounding.round_e2m1(x), expected)


def test_a_packed_weight_step_equals_the_packed_model() -> None:
    """The straight-through forward value is what the exported FP8/FP4 model computes."""
    released = replace(preset("tiny"), dense_dtype="fp8", expert_dtype="fp4")
    model, kernels = _model()
    assert isinstance(model.ops, TrainingOperators)
    WeightQuantiser(model, released, model.ops, kernels).prepare(torch.float32)
    ids = _ids()[:, :-1]
    hidden = hidden_rows(
        model, ids, _rows(model, kernels, Phase(sparse=True, quantise=True)), kernels
    )
    twin = CausalLM(released, ReferenceOperators(), torch.float32)
    packing = packed_weights(released)
    state = model.state_dict()
    for name, how in packing.items():
        encode = codec.encode_fp4_weight if how == "fp4" else codec.encode_fp8_weight
        codes, scales = encode(state[name])
        values = codes.view(torch.int8 if how == "fp4" else torch.float8_e4m3fn)
        state[name] = values
        state[name.removesuffix("weight") + "scale"] = scales.view(torch.float8_e8m0fnu)
    twin.load_state_dict(state)
    rows = DenseRows(model.plan, batch=2, length=LENGTH, scale=model.config.head_dim**-0.5)
    expected = twin.logits(twin.forward_dense(ids, rows, None))
    # A last-bit difference in a sum can flip one rounding or one selected row, so a few rows move;
    # a wrong format would move all of them.
    error = (hidden @ model.head.weight.t() - expected).abs()
    assert error.median() < 1e-5
    assert error.amax() < 0.5 * expected.std()
