"""The layer plan: who owns which rows, who borrows them, on which side of the encoder/decoder cut.

Built once from the config lists, validated, frozen, printable. Nothing else in cedar compares a
compression ratio with a number. Callers: the model (behaviour of each layer), the cache (which
rows exist), the planner and the page (what each layer owns, borrows and runs).

Roles (specification of the released plan):
    window   ratio 0: attends to its own sliding window only
    full     owns compressed KV rows and index keys, picks its own top-k
    reindex  borrows its KV owner's rows and keys, picks its own top-k with its own queries
    reuse    borrows rows and the top-k of its top-k owner
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cedar.errors import ConfigError

Role = Literal["window", "full", "reindex", "reuse"]
Side = Literal["encoder", "decoder"]
KVInput = Literal["self", "boundary"]
KVAdapter = Literal["none", "diag", "lowrank"]
Candidate = Literal["none", "source", "consumer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of the plan.

    Attributes:
        layer_id: 0-based.
        side: encoder (runs on every prompt token) or decoder (tail of the prompt, generated tokens).
        role: window, full, reindex or reuse.
        compress_ratio: tokens per compressed row of the cache this layer reads; 0 = none.
        kv_owner: layer whose compressed rows and index keys this layer reads; None for window.
        topk_owner: layer whose selection this layer uses; itself for full and reindex.
        kv_input: what feeds the compressor of a full layer: its own attention input, or the
            encoder boundary (the stream leaving the last encoder layer).
        candidate: source builds the candidate pool, consumer selects inside it.
        kv_adapter: per-layer linear map of borrowed rows before attention.
        has_engram: an n-gram memory is added to the stream entering this layer.
    """

    layer_id: int
    side: Side
    role: Role
    compress_ratio: int
    kv_owner: int | None
    topk_owner: int | None
    kv_input: KVInput
    candidate: Candidate
    kv_adapter: KVAdapter
    has_engram: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The ordered layers and the plan-level numbers.

    Attributes:
        layers: one spec per backbone layer.
        num_encoder_layers: the cut; layers below it are the causal encoder.
        sliding_window: rows each layer keeps per sequence, the query's own token included.
        index_topk: compressed rows a query may select.
        candidate_topk_blocks, candidate_block_size: size of the candidate pool (0 = no pool).
    """

    layers: tuple[LayerSpec, ...]
    num_encoder_layers: int
    sliding_window: int
    index_topk: int
    candidate_topk_blocks: int
    candidate_block_size: int

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer_id: int) -> LayerSpec:
        return self.layers[layer_id]

    @property
    def encoder(self) -> tuple[LayerSpec, ...]:
        """Layers below the cut."""
        return self.layers[: self.num_encoder_layers]

    @property
    def decoder(self) -> tuple[LayerSpec, ...]:
        """Layers at or above the cut."""
        return self.layers[self.num_encoder_layers :]

    @property
    def kv_owners(self) -> tuple[LayerSpec, ...]:
        """Full layers, in order: the only owners of compressed rows."""
        return tuple(spec for spec in self.layers if spec.role == "full")

    @property
    def boundary_owners(self) -> tuple[LayerSpec, ...]:
        """Full layers whose rows are projected from the encoder boundary."""
        return tuple(spec for spec in self.kv_owners if spec.kv_input == "boundary")

    @property
    def ced_blocker(self) -> str | None:
        """Why prefill may not skip the decoder for all but the last tokens; None if it may.

        CED needs a decoder, every decoder full layer fed from the boundary, and no Engram at or
        above the cut (its contribution would be missing from the rows of skipped tokens).
        """
        if not self.decoder:
            return "the plan has no decoder layers"
        for spec in self.decoder:
            if spec.has_engram:
                return (
                    f"layer {spec.layer_id} has an Engram at or above the encoder/decoder cut "
                    f"{self.num_encoder_layers}"
                )
        for spec in self.decoder:
            if spec.role == "full" and spec.kv_input != "boundary":
                return f"decoder layer {spec.layer_id} computes its KV rows from its own input"
        return None

    @property
    def ratio_lcm(self) -> int:
        """Least common multiple of all ratios: no group is open at multiples of it."""
        return math.lcm(*(spec.compress_ratio for spec in self.kv_owners)) if self.kv_owners else 1

    def table(self) -> str:
        """The plan as a fixed-width text table, one line per layer."""
        head = f"{'layer':>5} {'side':<8}{'role':<8}{'ratio':>5} {'kv':>4} {'topk':>5}  notes"
        lines = [head]
        for spec in self.layers:
            notes = [f"kv_input={spec.kv_input}"] if spec.role == "full" else []
            if spec.candidate != "none":
                notes.append(f"candidate {spec.candidate}")
            if spec.kv_adapter != "none":
                notes.append(f"kv_adapter={spec.kv_adapter}")
            if spec.has_engram:
                notes.append("engram")
            owner = "-" if spec.kv_owner is None else str(spec.kv_owner)
            topk = "-" if spec.topk_owner is None else str(spec.topk_owner)
            lines.append(
                f"{spec.layer_id:>5} {spec.side:<8}{spec.role:<8}{spec.compress_ratio:>5} "
                f"{owner:>4} {topk:>5}  {', '.join(notes)}".rstrip()
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLists:
    """The raw lists a plan is built from, named as in the config."""

    compress_ratios: Sequence[int]
    kv_source_layer_ids: Sequence[int]
    index_source_layer_ids: Sequence[int]
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    engram_layer_ids: Sequence[int]
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_encoder_layers: int | None
    decoder_kv_input: str
    kv_adapter: str
    sliding_window: int
    index_topk: int


def build_plan(lists: PlanLists) -> LayerPlan:
    """Validate the lists and derive one `LayerSpec` per layer.

    Raises:
        ConfigError: a rule is broken; the message names the list, the layer and what is allowed.
    """
    ratios = _check_ratios(lists)
    _check_sources(lists, ratios)
    cut = lists.num_encoder_layers
    if cut is None:
        cut = max(lists.kv_source_layer_ids, default=lists.num_hidden_layers)
    if not 0 < cut <= lists.num_hidden_layers:
        raise ConfigError(
            f"num_encoder_layers={cut} is out of range: allowed 1..{lists.num_hidden_layers} "
            f"(num_hidden_layers); by default it is max(kv_source_layer_ids)"
        )
    specs = tuple(_spec(layer_id, ratio, cut, lists) for layer_id, ratio in enumerate(ratios))
    plan = LayerPlan(
        layers=specs,
        num_encoder_layers=cut,
        sliding_window=lists.sliding_window,
        index_topk=lists.index_topk,
        candidate_topk_blocks=lists.candidate_topk_blocks,
        candidate_block_size=lists.candidate_block_size,
    )
    _check_borrowing(plan)
    _check_candidates(plan, lists)
    return plan


def _check_ratios(lists: PlanLists) -> tuple[int, ...]:
    expected = lists.num_hidden_layers + lists.num_nextn_predict_layers
    if len(lists.compress_ratios) != expected:
        raise ConfigError(
            f"compress_ratios has {len(lists.compress_ratios)} entries; it needs {expected} = "
            f"num_hidden_layers {lists.num_hidden_layers} + num_nextn_predict_layers "
            f"{lists.num_nextn_predict_layers}"
        )
    for layer_id, ratio in enumerate(lists.compress_ratios):
        if not isinstance(ratio, int) or isinstance(ratio, bool) or ratio < 0:
            raise ConfigError(
                f"compress_ratios[{layer_id}]={ratio!r} is not a ratio: allowed are integers >= 0 "
                f"(0 = sliding window only)"
            )
    drafts = lists.compress_ratios[lists.num_hidden_layers :]
    if any(drafts):
        raise ConfigError(
            f"compress_ratios ends with {list(drafts)} for the draft layers; the last "
            f"num_nextn_predict_layers={lists.num_nextn_predict_layers} entries must be 0"
        )
    return tuple(lists.compress_ratios[: lists.num_hidden_layers])


def _check_sources(lists: PlanLists, ratios: tuple[int, ...]) -> None:
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(lists, name)
        for layer_id in ids:
            if not 0 <= layer_id < lists.num_hidden_layers:
                raise ConfigError(
                    f"{name} names layer {layer_id}; allowed 0..{lists.num_hidden_layers - 1}"
                )
        if list(ids) != sorted(set(ids)):
            raise ConfigError(f"{name}={list(ids)} must be ascending without repeats")
    stray = sorted(set(lists.kv_source_layer_ids) - set(lists.index_source_layer_ids))
    if stray:
        raise ConfigError(
            f"kv_source_layer_ids {stray} are missing from index_source_layer_ids "
            f"{list(lists.index_source_layer_ids)}: every KV source owns an indexer"
        )
    for layer_id in lists.index_source_layer_ids:
        if ratios[layer_id] == 0:
            raise ConfigError(
                f"layer {layer_id} is a source but compress_ratios[{layer_id}]=0 (window only); "
                f"give it a ratio > 0 or remove it from the source lists"
            )


def _last_at_or_below(ids: Sequence[int], layer_id: int) -> int | None:
    return max((source for source in ids if source <= layer_id), default=None)


def _spec(layer_id: int, ratio: int, cut: int, lists: PlanLists) -> LayerSpec:
    side: Side = "encoder" if layer_id < cut else "decoder"
    has_engram = layer_id in lists.engram_layer_ids
    kv_owner = topk_owner = None
    role: Role = "window"
    if ratio > 0:
        kv_owner = _last_at_or_below(lists.kv_source_layer_ids, layer_id)
        topk_owner = _last_at_or_below(lists.index_source_layer_ids, layer_id)
        role = "reuse"
        if layer_id in lists.kv_source_layer_ids:
            role = "full"
        elif layer_id in lists.index_source_layer_ids:
            role = "reindex"
    source = lists.candidate_source_layer_id
    candidate: Candidate = "none"
    if source >= 0 and layer_id == source:
        candidate = "source"
    elif source >= 0 and role in ("full", "reindex") and layer_id > source:
        candidate = "consumer"
    # An Engram above the cut changes what a decoder layer's own input is, so there every full
    # layer keeps reading its own input and CED is off (`ced_blocker` says so when asked for).
    boundary = (
        lists.decoder_kv_input == "boundary"
        and side == "decoder"
        and role == "full"
        and max(lists.engram_layer_ids, default=-1) < cut
    )
    adapter: KVAdapter = "none"
    if role in ("reindex", "reuse") and lists.kv_adapter in ("diag", "lowrank"):
        adapter = "diag" if lists.kv_adapter == "diag" else "lowrank"
    return LayerSpec(
        layer_id=layer_id,
        side=side,
        role=role,
        compress_ratio=ratio,
        kv_owner=kv_owner,
        topk_owner=topk_owner,
        kv_input="boundary" if boundary else "self",
        candidate=candidate,
        kv_adapter=adapter,
        has_engram=has_engram,
    )


def _check_borrowing(plan: LayerPlan) -> None:
    for spec in plan.layers:
        if spec.role == "window":
            continue
        if spec.kv_owner is None or spec.topk_owner is None:
            raise ConfigError(
                f"layer {spec.layer_id} has compress ratio {spec.compress_ratio} but no KV source "
                f"at or below it: add one to kv_source_layer_ids or set its ratio to 0"
            )
        owner = plan[spec.kv_owner]
        if owner.compress_ratio != spec.compress_ratio:
            raise ConfigError(
                f"layer {spec.layer_id} has compress ratio {spec.compress_ratio} but its KV source "
                f"{spec.kv_owner} has {owner.compress_ratio}: they must be equal"
            )
        if plan[spec.topk_owner].kv_owner != spec.kv_owner:
            raise ConfigError(
                f"layer {spec.layer_id} reads rows of layer {spec.kv_owner} but would reuse the "
                f"selection of layer {spec.topk_owner}, which selects rows of layer "
                f"{plan[spec.topk_owner].kv_owner}: positions would not mean the same rows"
            )


def _check_candidates(plan: LayerPlan, lists: PlanLists) -> None:
    source = lists.candidate_source_layer_id
    if source < 0:
        return
    if source not in lists.index_source_layer_ids:
        raise ConfigError(
            f"candidate_source_layer_id={source} is not in index_source_layer_ids "
            f"{list(lists.index_source_layer_ids)}; use one of them, or -1 for no candidates"
        )
    pool = lists.candidate_topk_blocks * lists.candidate_block_size
    if lists.candidate_topk_blocks < 1 or lists.candidate_block_size < 1 or pool < lists.index_topk:
        raise ConfigError(
            f"candidate pool {lists.candidate_topk_blocks} blocks x {lists.candidate_block_size} = "
            f"{pool} positions is smaller than index_topk={lists.index_topk}: masked positions "
            f"could enter the selection; enlarge candidate_topk_blocks"
        )
    for spec in plan.layers:
        if spec.candidate == "consumer" and spec.kv_owner != plan[source].kv_owner:
            raise ConfigError(
                f"index source {spec.layer_id} reads rows of layer {spec.kv_owner}, but the "
                f"candidate pool of layer {source} is over rows of layer {plan[source].kv_owner}; "
                f"all later index sources must share its KV source"
            )
