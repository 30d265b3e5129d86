"""Work of a request: rows each phase runs, rows each query reads, activated parameters, FLOPs.

    encode   encoder layers on every new (and replayed) token
    project  KV rows of decoder owners fed from the boundary, same tokens, no attention, no MoE
    replay   decoder layers: on the tail of the prompt under CED, on every row otherwise
    decode   all layers, one token per step

Which rows a mode of the decoder's prefill runs is in `replay`.
"""

from __future__ import annotations

from cedar.config.layer_plan import LayerPlan, LayerSpec
from cedar.planner.expression import total_of
from cedar.planner.ledger import Ledger
from cedar.planner.replay import LayerRows, decoder_rows, first_rows, replayed_prefix
from cedar.planner.request import DecoderPrefill, Request
from cedar.planner.weights import PRODUCTS

_ROWS = "rows that enter the phase"
_TAIL = "decoder replay: the last rows of the prompt"
_VISIBLE = "causal visibility: query t sees min((t + 1) // ratio, cap) rows"
_MACS = "2 FLOPs a multiply-accumulate; elementwise work is left out"

PHASES = ("encode", "replay", "decode")


def add_request(ledger: Ledger, request: Request) -> None:
    """Add the request's numbers and what a prefix hit covers."""
    given = {
        "input_tokens": ("tokens", request.input_tokens),
        "output_tokens": ("tokens", request.output_tokens),
        "concurrency": ("sequences", request.concurrency),
        "hit_rate": ("", request.hit_rate),
        "block_size": ("tokens", request.block_size),
        "max_num_batched_tokens": ("tokens", request.max_num_batched_tokens),
        "tokens_per_turn": ("tokens", request.tokens_per_turn),
        "replay_windows": ("windows", request.replay_windows),
        "encoder_replay_windows": ("windows", request.encoder_replay_windows),
    }
    for name, (unit, value) in given.items():
        ledger.add(name, value, unit, "given", "the request")
    ledger.derive(
        "total_tokens", "input_tokens + output_tokens", "tokens", "one sequence at its end"
    )
    ledger.derive(
        "cached_tokens", "floor(input_tokens * hit_rate) // block_size * block_size", "tokens",
        "assumed prefix hit, whole blocks",
    )  # fmt: skip


def add_phases(
    ledger: Ledger, plan: LayerPlan, request: Request, mode: DecoderPrefill
) -> list[LayerRows]:
    """Add rows and layers of each phase; return the decoder's rows for `add_work`."""
    ledger.derive(
        "prefix.replayed_tokens", replayed_prefix(plan, request, mode), "tokens",
        "after a hit, windows are rebuilt by running the last rows of the prefix again",
    )  # fmt: skip
    ledger.derive(
        "phases.encode.tokens",
        "input_tokens - cached_tokens + prefix.replayed_tokens",
        "tokens",
        _ROWS,
    )
    ledger.derive(
        "phases.encode.start", "input_tokens - phases.encode.tokens", "position",
        "first position that is run; windows are clipped here",
    )  # fmt: skip
    ledger.derive("phases.encode.layers", "model.encoder_layers", "layers", "the encoder")
    ledger.derive("phases.project.tokens", "phases.encode.tokens", "tokens", _ROWS)
    ledger.derive("phases.project.layers", "model.boundary_owners", "KV projections", "layer plan")
    tail = "phases.encode.tokens"
    if mode != "full":
        tail = f"min({tail}, model.window * replay_windows)"
    ledger.derive("phases.replay.tail", tail, "tokens", _TAIL)
    wanted = f"min(input_tokens, {first_rows(plan, mode)}) - phases.encode.tokens"
    ledger.derive(
        "phases.replay.short", f"min(1, max(0, {wanted}))" if mode != "full" else "0", "",
        "1 if fewer rows ran than the replay would start from",
    )  # fmt: skip
    steps = decoder_rows(plan, mode)
    ledger.derive("phases.replay.tokens", steps[0].write if steps else "0", "tokens", _ROWS)
    ledger.derive("phases.replay.layers", "model.decoder_layers", "layers", "the decoder")
    ledger.derive("phases.decode.tokens", "output_tokens", "tokens", "one step a token")
    ledger.derive("phases.decode.layers", "model.layers", "layers", "all layers")
    _add_token_layers(ledger, plan, steps)
    return steps


def _add_token_layers(ledger: Ledger, plan: LayerPlan, steps: list[LayerRows]) -> None:
    index = [
        s for s, spec in zip(steps, plan.decoder, strict=True) if spec.role in ("full", "reindex")
    ]
    ledger.derive(
        "encode_token_layers", "phases.encode.tokens * phases.encode.layers", "tokens x layers",
        "encoder rows of the prefill",
    )  # fmt: skip
    ledger.derive(
        "decoder_token_layers", total_of(step.write for step in steps), "tokens x layers",
        "decoder rows of the prefill: every row that writes a window row",
    )  # fmt: skip
    ledger.derive(
        "decoder_query_layers", total_of(step.query for step in steps), "tokens x layers",
        "decoder rows whose output is computed",
    )  # fmt: skip
    ledger.derive(
        "decoder_index_rows", total_of(step.query for step in index), "tokens x layers",
        "queries of decoder layers that select rows",
    )  # fmt: skip
    ledger.derive(
        "decode_token_layers", "output_tokens * model.layers", "tokens x layers", "decode steps"
    )


def _between(end: str, first: str, ratio: int, cap: str) -> str:
    """Rows seen by the queries at positions first .. end - 1."""
    return f"seen({end}, {ratio}, {cap}) - seen({first}, {ratio}, {cap})"


def selected_rows(spec: LayerSpec, end: str, first: str) -> str:
    """Compressed rows one layer attends to for the queries at positions first .. end - 1."""
    return (
        "0"
        if spec.role == "window"
        else _between(end, first, spec.compress_ratio, "model.index_topk")
    )


def scored_rows(spec: LayerSpec, end: str, first: str) -> str:
    """Index keys one layer scores for the queries at positions first .. end - 1."""
    if spec.role not in ("full", "reindex"):
        return "0"
    cap = "model.candidate_pool" if spec.candidate == "consumer" else end
    return _between(end, first, spec.compress_ratio, cap)


def add_work(ledger: Ledger, plan: LayerPlan, steps: list[LayerRows], mode: DecoderPrefill) -> None:
    """Add rows read, FLOPs of each phase and part, and the activation of the prefill."""
    start, end = "phases.encode.start", "input_tokens"
    new = "seen(phases.encode.tokens, 1, model.window)"
    _add_entries(ledger, "encode", [(s, end, start, new) for s in plan.encoder])
    replay = []
    for spec, step in zip(plan.decoder, steps, strict=True):
        window = _between(step.write, f"{step.write} - {step.query}", 1, "model.window")
        replay.append((spec, end, f"input_tokens - {step.query}", window))
    _add_entries(ledger, "replay", replay)
    window = _between("total_tokens", "input_tokens", 1, "model.window")
    _add_entries(
        ledger, "decode", [(s, "total_tokens", "input_tokens", window) for s in plan.layers]
    )
    _add_flops(ledger)
    _add_activation(ledger, skips_decoder=mode != "full")


def _add_entries(ledger: Ledger, phase: str, layers: list[tuple[LayerSpec, str, str, str]]) -> None:
    """Index keys scored, compressed rows attended and window rows attended, over all layers."""
    sums = {
        "scored": total_of(scored_rows(spec, end, first) for spec, end, first, _ in layers),
        "selected": total_of(selected_rows(spec, end, first) for spec, end, first, _ in layers),
        "window": total_of(window for *_, window in layers),
    }
    for kind, formula in sums.items():
        ledger.derive(f"entries.{phase}.{kind}", formula, "rows", _VISIBLE)


def _add_flops(ledger: Ledger) -> None:
    rows = {"encode": "phases.encode.tokens", "decode": "output_tokens"}
    for phase in PHASES:
        for product in PRODUCTS:
            if phase == "encode":
                formula = f"2 * {rows[phase]} * macs.encoder.{product}"
            elif phase == "decode":
                formula = f"2 * {rows[phase]} * (macs.encoder.{product} + macs.decoder.{product})"
            else:
                formula = _replay_flops(product)
            ledger.derive(f"flops.{phase}.{product}", formula, "FLOP", _MACS)
        ledger.derive(
            f"flops.{phase}.index_scoring",
            f"2 * model.index_heads * model.index_head_dim * entries.{phase}.scored", "FLOP", _MACS,
        )  # fmt: skip
        ledger.derive(
            f"flops.{phase}.attention",
            "4 * model.heads * model.head_dim *"
            f" (entries.{phase}.selected + entries.{phase}.window)",
            "FLOP", "scores and weighted sum; " + _MACS,
        )  # fmt: skip
    ledger.derive("flops.decode.head", "2 * output_tokens * macs.head", "FLOP", _MACS)
    ledger.derive(
        "flops.project.kv_projections", "2 * phases.project.tokens * macs.projection", "FLOP", _MACS
    )
    ledger.derive("flops.prefill.head", "2 * macs.head", "FLOP", "logits of the last row; " + _MACS)
    for phase in (*PHASES, "project"):
        parts = [name for name in ledger if name.startswith(f"flops.{phase}.")]
        ledger.derive(f"flops.{phase}.total", " + ".join(parts), "FLOP", "sum of the parts")
    ledger.derive(
        "flops.prefill.total",
        "flops.encode.total + flops.project.total + flops.replay.total + flops.prefill.head",
        "FLOP", "sum of the phases",
    )  # fmt: skip
    ledger.derive(
        "flops.decode_token", "flops.decode.total / output_tokens", "FLOP", "mean of a step"
    )


def _replay_flops(product: str) -> str:
    """Decoder prefill: layers are alike, so a product's share of a layer is its sum / layers."""
    macs = f"macs.decoder.{product}"
    if product == "kv_projections":  # of owners fed from the boundary: done by `project`
        return f"2 * phases.encode.tokens * ({macs} - macs.projection)"
    if product in ("index_queries", "index_weights"):
        return f"2 * decoder_index_rows * {macs} / max(1, model.decoder_index_layers)"
    queries = f"2 * decoder_query_layers * {macs} / max(1, model.decoder_layers)"
    if product == "attention_projections":
        return f"{queries} + 2 * (decoder_token_layers - decoder_query_layers) * macs.window_row"
    return queries


def _add_activation(ledger: Ledger, *, skips_decoder: bool) -> None:
    bulk = "activated.encoder + parameters.projection"
    ledger.derive(
        "activated_prefill", bulk if skips_decoder else "activated_decode_headless", "parameters",
        "weights one prompt token outside the replayed tail multiplies, head excluded",
    )  # fmt: skip
    if skips_decoder:
        ledger.derive(
            "activated_prefill_after_first_decoder_layer",
            "activated.encoder + parameters.projection + activated.first_decoder"
            " - activated.first_projection",
            "parameters", "variant that runs the first decoder layer on every token before it cuts",
        )  # fmt: skip
    ledger.derive(
        "prefill_activation_derived",
        "(phases.encode.tokens * (activated.encoder + parameters.projection)"
        " + decoder_token_layers * (activated.decoder - parameters.projection)"
        " / max(1, model.decoder_layers) + parameters.head) / 1000000000",
        "10^9 parameter-tokens", "rows run x parameters each multiplies, all phases of the prefill",
    )  # fmt: skip
