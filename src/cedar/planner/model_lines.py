"""Ledger lines that depend on the model alone: widths, row bytes, parameters, MACs a token.

Everything a request is multiplied with later. Counts come from `weights.weigh`, row bytes from
`formats.rows`; nothing is typed in.
"""

from __future__ import annotations

from fractions import Fraction

from cedar.config.layer_plan import LayerPlan
from cedar.config.model_config import ModelConfig
from cedar.formats.rows import RowFormats
from cedar.planner.expression import Number
from cedar.planner.ledger import Ledger
from cedar.planner.weights import LAYER_PARTS, PRODUCTS, ModelWeights

#: Groups of lines that are constants of the model; left out of a flow's JSON, kept in its ledger.
MODEL_GROUPS = ("model", "rows", "parameters", "macs", "activated")

_SHAPES = "sum over the shapes of the weight schema"


def add_model(ledger: Ledger, config: ModelConfig, weights: ModelWeights) -> None:
    """Add widths, row bytes, parameters, activated parameters and multiplications of one config."""
    _add_widths(ledger, config)
    _add_rows(ledger, config)
    ced = bool(config.plan.boundary_owners)
    _add_parameters(ledger, weights, ced=ced)
    _add_activated(ledger)
    _add_macs(ledger, config, weights, ced=ced)


def _add_widths(ledger: Ledger, config: ModelConfig) -> None:
    plan = config.plan
    fields = {
        "window": ("sliding_window", plan.sliding_window),
        "index_topk": ("index_topk", plan.index_topk),
        "heads": ("num_attention_heads", config.num_attention_heads),
        "head_dim": ("head_dim", config.head_dim),
        "index_heads": ("index_n_heads", config.index_n_heads),
        "index_head_dim": ("index_head_dim", config.index_head_dim),
        "experts": ("n_routed_experts", config.n_routed_experts),
        "experts_per_token": ("num_experts_per_tok", config.num_experts_per_tok),
        "expert_width": ("moe_intermediate_size", config.moe_intermediate_size),
        "hidden": ("hidden_size", config.hidden_size),
        "copies": ("hc_mult", config.hc_mult),
        "vocab": ("vocab_size", config.vocab_size),
        "layers": ("num_hidden_layers", len(plan)),
        "draft_layers": ("num_nextn_predict_layers", config.num_nextn_predict_layers),
    }
    for name, (key, value) in fields.items():
        ledger.add(f"model.{name}", value, "", key, f"config: {key}")
    pool = plan.candidate_topk_blocks * plan.candidate_block_size
    words = "candidate_topk_blocks * candidate_block_size"
    ledger.add("model.candidate_pool", pool, "positions", words, "config")
    cut = "num_encoder_layers, by default max(kv_source_layer_ids)"
    ledger.add("model.encoder_layers", len(plan.encoder), "layers", cut, "layer plan")
    ledger.derive(
        "model.decoder_layers", "model.layers - model.encoder_layers", "layers", "layer plan"
    )
    counts = {
        "boundary_owners": ("full layers whose rows are projected from the encoder boundary",
                            len(plan.boundary_owners)),
        "decoder_index_layers": ("full and reindex layers of the decoder",
                                 sum(spec.role in ("full", "reindex") for spec in plan.decoder)),
    }  # fmt: skip
    for name, (words, value) in counts.items():
        ledger.add(f"model.{name}", value, "layers", words, "layer plan")


def _add_rows(ledger: Ledger, config: ModelConfig) -> None:
    formats = RowFormats.of(config)
    layouts = {
        "main": "head_dim / 2 packed FP4 + head_dim / 16 scales",
        "index": "index_head_dim / 2 packed FP4 + index_head_dim / 32 scales",
        "window": "head_dim FP8 + head_dim / 32 scales",
    }
    for kind, words in layouts.items():
        value = getattr(formats, kind).row_bytes
        ledger.add(f"rows.{kind}_bytes", value, "B", words, "cedar.formats.rows", "derived")
    ledger.derive(
        "rows.global_bytes", "rows.main_bytes + rows.index_bytes", "B", "cedar.formats.rows"
    )


def _add_parameters(ledger: Ledger, weights: ModelWeights, *, ced: bool) -> None:
    for side, tally in weights.sides.items():
        for part in LAYER_PARTS:
            ledger.add(
                f"parameters.{side}.{part}", tally.parameters[part], "parameters",
                f"{part} tensors of the {side}'s layers", _SHAPES, "derived",
            )  # fmt: skip
    totals = weights.total.parameters
    for name in ("embed", "head", "engram_tables", "vision", "draft"):
        value = totals[name]
        ledger.add(f"parameters.{name}", value, "parameters", f"{name} tensors", _SHAPES, "derived")
    layer_norms = sum(tally.parameters["norms"] for tally in weights.sides.values())
    ledger.add(
        "parameters.final_norm", totals["norms"] - layer_norms, "parameters", "norm.weight",
        _SHAPES, "derived",
    )  # fmt: skip
    sides = [f"parameters.{s}.{p}" for s in weights.sides for p in LAYER_PARTS if p != "engram"]
    everywhere = ["parameters.embed", "parameters.head", "parameters.final_norm"]
    ledger.derive(
        "parameters.backbone", " + ".join(sides + everywhere), "parameters",
        "every text weight but the n-gram memory",
    )  # fmt: skip
    ledger.derive(
        "parameters.engram", "parameters.encoder.engram + parameters.decoder.engram", "parameters",
        "projections of the n-gram memory",
    )  # fmt: skip
    ledger.derive(
        "parameters.total",
        "parameters.backbone + parameters.engram_tables + parameters.engram + parameters.vision + "
        "parameters.draft",
        "parameters", "everything in the checkpoint",
    )  # fmt: skip
    projection = sum(weights.projection.parameters.values()) if ced else 0
    ledger.add(
        "parameters.projection", projection, "parameters",
        "compressor and index key of decoder owners fed from the boundary", _SHAPES, "derived",
    )  # fmt: skip
    for name, value in zip(
        ("first_decoder", "first_projection"), weights.first_decoder, strict=True
    ):
        ledger.add(
            f"activated.{name}", value, "parameters",
            "first decoder layer" + (", its projection only" if "projection" in name else ""),
            _SHAPES, "derived",
        )  # fmt: skip


def _add_activated(ledger: Ledger) -> None:
    for side in ("encoder", "decoder"):
        parts = [f"parameters.{side}.{part}" for part in LAYER_PARTS if part != "routed_experts"]
        routed = f"parameters.{side}.routed_experts * model.experts_per_token // model.experts"
        ledger.derive(
            f"activated.{side}", " + ".join([*parts, routed]), "parameters",
            f"weights of the {side}'s layers one token multiplies; tables are looked up",
        )  # fmt: skip
    ledger.derive(
        "activated_decode_headless", "activated.encoder + activated.decoder", "parameters",
        "all layers, without the head",
    )  # fmt: skip
    ledger.derive(
        "activated_decode", "activated_decode_headless + parameters.head", "parameters",
        "all layers and the head; the embedding is a lookup",
    )  # fmt: skip


def _add_macs(ledger: Ledger, config: ModelConfig, weights: ModelWeights, *, ced: bool) -> None:
    for side, tally in weights.sides.items():
        for product in PRODUCTS:
            macs = tally.macs(product, config)
            ledger.add(
                f"macs.{side}.{product}", _number(macs), "MAC",
                f"{product} matrices of the {side}'s layers, a token", _SHAPES, "derived",
            )  # fmt: skip
    macs = weights.projection.macs("kv_projections", config) if ced else Fraction()
    ledger.add(
        "macs.projection", _number(macs), "MAC",
        "KV projections of decoder owners fed from the boundary, a token", _SHAPES, "derived",
    )  # fmt: skip
    ledger.derive(
        "macs.window_row", "model.hidden * model.head_dim", "MAC", "attn.wkv of one layer"
    )
    ledger.derive(
        "macs.head", "model.vocab * model.hidden", "MAC", "head.weight, one row of logits"
    )


def _number(value: Fraction) -> Number:
    return value.numerator if value.denominator == 1 else float(value)


def owner_terms(plan: LayerPlan, tokens: str, *, side: str | None = None) -> str:
    """Rows of all KV owners after `tokens` tokens, as a formula: "3 * (n // 2) + 1 * (n // 1)"."""
    counts: dict[int, int] = {}
    for spec in plan.kv_owners:
        if side in (None, spec.side):
            counts[spec.compress_ratio] = counts.get(spec.compress_ratio, 0) + 1
    return " + ".join(f"{n} * ({tokens} // {ratio})" for ratio, n in counts.items()) or "0"
