"""Argument blocks of the chains of a layer: C structs of weight addresses, filled once per layer.

Mirror `src/layer.h` field by field. Built by the native operator set, which keeps each block beside the
weights it came from; a block holds addresses only.
"""

from __future__ import annotations

import ctypes

import torch

from cedar.kernels.operators import (
    AttentionWeights,
    ExpertBank,
    FeedForwardWeights,
    HyperWeights,
    IndexWeights,
    LayerWeights,
    Weight,
)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
SCORING = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}


def weight_kind(weight: Weight) -> int:
    """The flag kernels know a weight's format by."""
    if weight.scale is None:
        return DTYPES[weight.values.dtype]
    return 3 if weight.values.dtype == torch.int8 else 2


class WeightBlock(ctypes.Structure):
    """`Weight` in linear.h."""

    _fields_ = (
        ("kind", ctypes.c_int32), ("values", ctypes.c_void_p), ("scales", ctypes.c_void_p),
        ("out", ctypes.c_int64), ("inp", ctypes.c_int64),
    )  # fmt: skip

    @classmethod
    def of(cls, weight: Weight) -> WeightBlock:
        """The block of a projection."""
        values, scale = weight
        out, inp = values.shape
        packed_pairs = values.dtype == torch.int8
        return cls(
            weight_kind(weight), values.data_ptr(), None if scale is None else scale.data_ptr(),
            out, 2 * inp if packed_pairs else inp,
        )  # fmt: skip


class HyperBlock(ctypes.Structure):
    """`HyperWeights` in layer.h."""

    _fields_ = (
        ("fn", ctypes.c_void_p), ("base", ctypes.c_void_p), ("scale", ctypes.c_void_p),
        ("iterations", ctypes.c_int32), ("eps", ctypes.c_float), ("norm_eps", ctypes.c_float),
    )  # fmt: skip

    @classmethod
    def of(cls, weights: HyperWeights) -> HyperBlock:
        """The block of one sublayer's mixes."""
        fn, base, scale = weights.fn.data_ptr(), weights.base.data_ptr(), weights.scale.data_ptr()
        return cls(fn, base, scale, weights.iters, weights.eps, weights.norm_eps)


class ExpertsBlock(ctypes.Structure):
    """`ExpertWeights` in moe.h: addresses of one projection of every expert."""

    _fields_ = (("values", ctypes.c_void_p), ("scales", ctypes.c_void_p))


class FeedForwardBlock(ctypes.Structure):
    """`FeedForwardWeights` in layer.h."""

    _fields_ = (
        ("copies", ctypes.c_int64), ("width", ctypes.c_int64), ("inner", ctypes.c_int64),
        ("experts", ctypes.c_int64), ("chosen", ctypes.c_int64),
        ("attention", HyperBlock), ("ffn", HyperBlock),
        ("norm", ctypes.c_void_p), ("norm_dtype", ctypes.c_int32), ("gate_dtype", ctypes.c_int32),
        ("gate", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("scoring", ctypes.c_int32), ("normalise", ctypes.c_int32),
        ("route_scale", ctypes.c_float), ("limit", ctypes.c_float),
        ("kind", ctypes.c_int32), ("w1", ExpertsBlock), ("w3", ExpertsBlock), ("w2", ExpertsBlock),
        ("shared_w1", WeightBlock), ("shared_w3", WeightBlock), ("shared_w2", WeightBlock),
    )  # fmt: skip

    @classmethod
    def of(cls, weights: FeedForwardWeights) -> FeedForwardBlock:
        """The block of one layer; its experts become a bank, whose tables of addresses it needs."""
        bank = weights.experts
        if not isinstance(bank, ExpertBank):
            bank = weights.experts = ExpertBank(bank)
        router, norm, first = weights.router, weights.norm, bank[0].w1
        experts, width = router.gate.shape
        copies = weights.ffn.fn.shape[1] // width
        tables = [ctypes.addressof(table) for table in bank.addresses]
        w1, w3, w2 = (ExpertsBlock(*tables[i : i + 2]) for i in (0, 2, 4))
        return cls(
            copies, width, first.values.shape[0], experts, router.topk,
            HyperBlock.of(weights.attention), HyperBlock.of(weights.ffn),
            norm.data_ptr(), DTYPES[norm.dtype], DTYPES[router.gate.dtype],
            router.gate.data_ptr(), router.bias.data_ptr(),
            SCORING[router.scoring], int(router.normalise), router.scale, weights.limit,
            weight_kind(first), w1, w3, w2, *(WeightBlock.of(w) for w in weights.shared),
        )  # fmt: skip


class AttentionBlock(ctypes.Structure):
    """`AttentionWeights` in layer.h."""

    _fields_ = (
        ("heads", ctypes.c_int64), ("groups", ctypes.c_int64),
        ("wkv", WeightBlock), ("wq_a", WeightBlock), ("wq_b", WeightBlock), ("wo_a", WeightBlock),
        ("wo_b", WeightBlock), ("kv_norm", ctypes.c_void_p), ("q_norm", ctypes.c_void_p),
        ("kv_norm_dtype", ctypes.c_int32), ("q_norm_dtype", ctypes.c_int32),
        ("eps", ctypes.c_float), ("sink", ctypes.c_void_p),
    )  # fmt: skip

    @classmethod
    def of(cls, weights: AttentionWeights) -> AttentionBlock:
        """The block of one layer."""
        projections = (weights.wkv, weights.wq_a, weights.wq_b, weights.wo_a, weights.wo_b)
        kv_norm, q_norm = weights.kv_norm, weights.q_norm
        return cls(
            weights.heads, weights.groups, *(WeightBlock.of(w) for w in projections),
            kv_norm.data_ptr(), q_norm.data_ptr(), DTYPES[kv_norm.dtype], DTYPES[q_norm.dtype],
            weights.eps, weights.sink.data_ptr(),
        )  # fmt: skip


class IndexBlock(ctypes.Structure):
    """`IndexWeights` in layer.h."""

    _fields_ = (
        ("heads", ctypes.c_int64), ("width", ctypes.c_int64), ("wq_b", WeightBlock),
        ("head_weights", WeightBlock), ("scale", ctypes.c_float),
    )  # fmt: skip

    @classmethod
    def of(cls, weights: IndexWeights) -> IndexBlock:
        """The block of one index source."""
        heads = weights.head_weights.values.shape[0]
        return cls(
            heads, weights.wq_b.values.shape[0] // heads, WeightBlock.of(weights.wq_b),
            WeightBlock.of(weights.head_weights), weights.scale,
        )  # fmt: skip


class LayerBlock(ctypes.Structure):
    """`LayerWeights` in layer.h."""

    _fields_ = (
        ("norm", ctypes.c_void_p), ("norm_dtype", ctypes.c_int32), ("eps", ctypes.c_float),
        ("attention", AttentionBlock), ("index", IndexBlock), ("feed_forward", FeedForwardBlock),
    )  # fmt: skip

    @classmethod
    def of(cls, weights: LayerWeights) -> LayerBlock:
        """The block of one layer."""
        norm, index = weights.norm, weights.index
        return cls(
            norm.data_ptr(), DTYPES[norm.dtype], weights.eps, AttentionBlock.of(weights.attention),
            IndexBlock() if index is None else IndexBlock.of(index),
            FeedForwardBlock.of(weights.feed_forward),
        )  # fmt: skip
