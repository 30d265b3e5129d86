"""What a config's weights count, weigh and multiply: everything is summed from `weight_schema`.

Parameters by part, activated parameters, multiply-accumulates a token, bytes by residency class,
and how tensors split under tensor parallelism. No formula about requests lives here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, get_args

from cedar.config.layer_plan import LayerSpec, Side
from cedar.config.model_config import ModelConfig
from cedar.config.weight_schema import Part, TensorSpec, layer_schema, weight_schema
from cedar.errors import UsageError
from cedar.planner.expression import ceil_div

#: What one layer's matrices are multiplied for; a FLOP line each.
Product = Literal["attention_projections", "kv_projections", "index_queries", "index_weights",
                  "routed_experts", "shared_experts", "router", "hyper_connections", "engram",
                  "adapter"]  # fmt: skip
PRODUCTS: tuple[Product, ...] = get_args(Product)

#: Residency classes: tensors that are needed at the same rhythm and may live in the same places.
WeightClass = Literal["resident", "routed_experts", "embed", "vision", "draft", "engram_tables"]

Place = Literal["gpu", "ram", "ssd"]

#: Parts of one backbone layer that carry parameters (Engram tables are counted apart).
LAYER_PARTS: tuple[Part, ...] = ("attention", "compressor", "indexer", "adapter", "router",
                                 "norms", "routed_experts", "shared_experts",
                                 "hyper_connections", "engram")  # fmt: skip

#: Where each class can live, fastest first, and why.
CAN_LIVE: dict[WeightClass, tuple[tuple[Place, ...], str]] = {
    "resident": (("gpu", "ram"), "every token multiplies all of it"),
    "routed_experts": (("gpu", "ram", "ssd"), "a token multiplies a few a layer"),
    "embed": (("gpu", "ram", "ssd"), "a token reads one row"),
    "vision": (("gpu", "ram", "ssd"), "read for images only"),
    "draft": (("gpu", "ram", "ssd"), "read when drafting only"),
    "engram_tables": (("gpu", "ram", "ssd"), "a token reads a few rows, known ahead"),
}

_CLASS_OF_PART: dict[Part, WeightClass] = {
    "routed_experts": "routed_experts",
    "embed": "embed",
    "vision": "vision",
    "draft": "draft",
    "engram_tables": "engram_tables",
}

#: Tensors that a tensor-parallel rank holds only its share of; the others are replicated.
#: Source: the released reference program's split (vocabulary, heads, groups, experts, table rows).
_SPLIT = (".wq_b.", ".wo_a.", ".wo_b.", ".attn_sink", ".weights_proj.", ".ffn.experts.")


def weight_class(part: Part) -> WeightClass:
    """Residency class of a part."""
    return _CLASS_OF_PART.get(part, "resident")


def is_split(tensor: TensorSpec) -> bool:
    """Whether tensor parallelism gives a rank only its share of this tensor."""
    if tensor.part in ("embed", "head", "routed_experts", "engram_tables"):
        return True
    return any(mark in tensor.name for mark in _SPLIT)


def padded_width(width: int, ways: int, alignment: int = 1) -> int:
    """Columns one of `ways` ranks allocates when `width` is split and padded up to `alignment`.

    2304 split 8 ways at alignment 128 is 384 a rank, not 288: 1.33 times the even share.
    """
    if width < 1 or ways < 1 or alignment < 1:
        raise UsageError(
            f"cannot split {width} columns {ways} ways at alignment {alignment}: all >= 1"
        )
    return ceil_div(ceil_div(width, ways), alignment) * alignment


def expert_bytes(config: ModelConfig, inner: int | None = None) -> int:
    """Bytes of one routed expert of inner width `inner` (the model's own when None).

    18,800,640 B in the release: 3 * (D * F / 2 packed FP4 + D * F / 32 scales).
    """
    inner = config.moe_intermediate_size if inner is None else inner
    one = replace(config, moe_intermediate_size=inner, n_routed_experts=1, num_experts_per_tok=1)
    layer = layer_schema(one, config.plan[0])
    return sum(tensor.nbytes for tensor in layer if tensor.part == "routed_experts")


@dataclass
class Tally:
    """Sums over the tensors of one side, or of the whole model."""

    parameters: Counter[Part] = field(default_factory=Counter)
    nbytes: Counter[Part] = field(default_factory=Counter)
    split_bytes: Counter[Part] = field(default_factory=Counter)
    #: parameters multiplied, by product and by the number of tokens that share one multiplication
    products: Counter[tuple[Product, int]] = field(default_factory=Counter)
    tensors: int = 0

    def add(self, tensor: TensorSpec, tokens: int) -> None:
        """Count one tensor, multiplied once for every `tokens` tokens."""
        nbytes = tensor.nbytes
        self.tensors += 1
        self.parameters[tensor.part] += tensor.parameters
        self.nbytes[tensor.part] += nbytes
        if is_split(tensor):
            self.split_bytes[tensor.part] += nbytes
        product = _product(tensor)
        if product is not None:
            self.products[product, tokens] += tensor.parameters

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.parameters + other.parameters,
            self.nbytes + other.nbytes,
            self.split_bytes + other.split_bytes,
            self.products + other.products,
            self.tensors + other.tensors,
        )

    def macs(self, product: Product, config: ModelConfig) -> Fraction:
        """Multiply-accumulates a token; routed experts by the share that is chosen."""
        macs = sum(
            (Fraction(n, tokens) for (name, tokens), n in self.products.items() if name == product),
            Fraction(),
        )
        if product == "routed_experts":
            return macs * config.num_experts_per_tok / config.n_routed_experts
        if product == "adapter":  # once on each query head, once on each output head
            return macs * 2 * config.num_attention_heads
        return macs


@dataclass(frozen=True)
class ModelWeights:
    """Totals of one config.

    Attributes:
        total: every tensor of the checkpoint.
        sides: backbone layers of the encoder and of the decoder; the tables of an Engram are in
            its layer's side.
        projection: the compressor and index-key weights of the decoder's full layers.
        first_decoder: activated parameters of the first decoder layer, and its projection's share.
        engram_buffers: bytes of each Engram tensor, the buffers a pinned allocator rounds.
    """

    total: Tally
    sides: dict[Side, Tally]
    projection: Tally
    first_decoder: tuple[int, int]
    engram_buffers: tuple[int, ...]


def _product(tensor: TensorSpec) -> Product | None:
    """What a matrix is multiplied for; None for vectors, scales, tables and elementwise weights."""
    if tensor.part == "adapter":
        return "adapter"
    if len(tensor.shape) != 2 or not tensor.parameters:
        return None
    match tensor.part:
        case "attention":
            return "attention_projections"
        case "compressor":
            return "kv_projections"
        case "indexer" if tensor.name.endswith("indexer.wk.weight"):
            return "kv_projections"
        case "indexer":
            return "index_queries" if ".wq_b." in tensor.name else "index_weights"
        case "engram":
            return "engram" if ".wkv." in tensor.name else None
        case "routed_experts" | "shared_experts" | "router" | "hyper_connections":
            return tensor.part
        case _:
            return None


def _is_projection(tensor: TensorSpec) -> bool:
    return tensor.part == "compressor" or ".indexer.wk." in tensor.name or ".k_norm." in tensor.name


def activated(parameters: Counter[Part], config: ModelConfig) -> int:
    """Parameters of backbone layers that one token multiplies, routed experts by their share."""
    routed = parameters["routed_experts"]
    others = sum(parameters[part] for part in LAYER_PARTS) - routed
    return others + routed * config.num_experts_per_tok // config.n_routed_experts


def weigh(config: ModelConfig) -> ModelWeights:
    """Sum the tensors of a config's schema; layers of one kind are counted once and added up."""
    kinds: dict[tuple[object, ...], tuple[Tally, Tally]] = {}
    sides: dict[Side, Tally] = {"encoder": Tally(), "decoder": Tally()}
    projection = Tally()
    first_decoder = (0, 0)
    for spec in config.plan.layers:
        kind = (spec.role, spec.compress_ratio, spec.kv_adapter, spec.has_engram and spec.layer_id)
        if kind not in kinds:
            kinds[kind] = _weigh_layer(config, spec)
        whole, projected = kinds[kind]
        sides[spec.side] += whole
        if spec.side == "decoder":
            projection += projected
        if spec.layer_id == config.plan.num_encoder_layers:
            first_decoder = (
                activated(whole.parameters, config),
                sum(projected.parameters.values()),
            )
    return ModelWeights(
        total=sides["encoder"] + sides["decoder"] + _weigh_rest(config),
        sides=sides,
        projection=projection,
        first_decoder=first_decoder,
        engram_buffers=tuple(
            tensor.nbytes
            for spec in config.plan.layers
            if spec.has_engram
            for tensor in layer_schema(config, spec)
            if tensor.part == "engram_tables"
        ),
    )


def _weigh_layer(config: ModelConfig, spec: LayerSpec) -> tuple[Tally, Tally]:
    """One layer, and its compressor and index key alone."""
    whole, projected = Tally(), Tally()
    for tensor in layer_schema(config, spec):
        # One index key is made per compressed row, every other product once per token.
        tokens = spec.compress_ratio if tensor.name.endswith(".indexer.wk.weight") else 1
        whole.add(tensor, tokens)
        if _is_projection(tensor):
            projected.add(tensor, tokens)
    return whole, projected


def _weigh_rest(config: ModelConfig) -> Tally:
    """Everything outside the backbone's layers: the schema of the model cut to one plain layer."""
    cut = replace(
        config, num_hidden_layers=1, compress_ratios=(0,) * (1 + config.num_nextn_predict_layers),
        kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=-1,
        engram_layer_ids=(), engram_num_embeddings=(), num_encoder_layers=1,
    )  # fmt: skip
    rest = Tally()
    for tensor in weight_schema(cut):
        if not tensor.name.startswith("layers."):
            rest.add(tensor, 1)
    return rest
