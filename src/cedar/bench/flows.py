"""The four flows of one model on one request, really run; each measured beside the ledger's prediction.

Called by `cedar compare`. Random-weight models run all four flows: four models of one size that
differ in nothing else. A trained model runs the flows its weights support, and its text comes out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cedar.bench.memory import PeakMemory
from cedar.cache.hashing import KEY_BYTES, block_keys, chain_start
from cedar.cache.state import ModelState
from cedar.cache.store import PrefixStore
from cedar.cache.store_records import Record
from cedar.cache.transfer import block_payload
from cedar.config.flows import FLOWS, Flow, flow_config
from cedar.config.model_config import ModelConfig
from cedar.config.modes import DecoderPrefill
from cedar.config.weight_schema import weight_schema
from cedar.engine.account import Account
from cedar.engine.loaded_model import LoadedModel
from cedar.errors import UsageError

Progress = Callable[[str], None]
FlowModels = Mapping[Flow, Callable[[], LoadedModel]]
#: Prompt tokens read before the clock starts, so that no flow pays for first calls.
_WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Persisted:
    """Bytes in a prefix store: of rows, and of its files."""

    row_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class FlowRun:
    """What one flow did.

    Attributes:
        flow: which.   decoder_prefill: how the prompt was read.
        account: tokens, layers and seconds of the phases.
        kv_bytes, window_bytes: in use after the last token, counted from the buffers.
        persisted: what a prefix store took of it.
        prefill_seconds: prefill wall time.   decode_seconds: of all steps.
        peak_bytes: most memory in use above the start of the run (resident set).
        output_ids: greedy tokens.
    """

    flow: Flow
    decoder_prefill: str
    account: Account
    kv_bytes: int
    window_bytes: int
    persisted: Persisted
    prefill_seconds: float
    decode_seconds: float
    peak_bytes: int
    output_ids: tuple[int, ...]

    @property
    def prefill_token_layers(self) -> int:
        """Tokens x layers that prefill ran, in encoder and decoder."""
        return self.account.encode.token_layers + self.account.replay.token_layers

    def to_dict(self) -> dict[str, Any]:
        """Measured values, as the `measured` object of the record."""
        account = self.account
        return {
            "kind": "measured",
            "decoder_prefill": self.decoder_prefill,
            "kv_bytes": self.kv_bytes,
            "window_bytes": self.window_bytes,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "encode_token_layers": account.encode.token_layers,
            "project_token_layers": account.project.token_layers,
            "decoder_token_layers": account.replay.token_layers,
            "decode_token_layers": account.decode.token_layers,
            "prefill_token_layers": self.prefill_token_layers,
            "phases": account.to_dict(),
            "peak_bytes": self.peak_bytes,
            "persisted_bytes": self.persisted.row_bytes,
            "persisted_file_bytes": self.persisted.file_bytes,
            "persisted_kind": "measured: rows of complete blocks in a prefix store without windows",
        }


def random_flow_models(
    config: ModelConfig, build: Callable[[ModelConfig], LoadedModel]
) -> tuple[FlowModels, dict[Flow, str]]:
    """Constructors of the flows a random-weight model can run, and why not for the others.

    Args:
        build: random weights of a config; called flow by flow, to save memory.
    """
    reasons = {flow: blocker for flow in FLOWS if (blocker := _blocker(config, flow)) is not None}
    possible = [flow for flow in FLOWS if flow not in reasons]
    return {flow: partial(build, flow_config(config, flow)) for flow in possible}, reasons


def trained_flow_models(
    model: LoadedModel, rebuild: Callable[[ModelConfig], LoadedModel]
) -> tuple[FlowModels, dict[Flow, str]]:
    """Constructors of the flows whose tensors a trained model has, and why not for the others.

    Args:
        rebuild: the same weights under another config of the same tensors.
    """
    have = {tensor.name for tensor in weight_schema(model.config)}
    possible, reasons = random_flow_models(model.config, rebuild)
    possible = dict(possible)
    for flow in list(possible):
        config = flow_config(model.config, flow)
        lacking = sorted({tensor.name for tensor in weight_schema(config)} - have)
        if lacking:
            reasons[flow] = (
                f"its weights lack {len(lacking)} tensors this flow needs, such as {lacking[0]}: the "
                f"model was trained with shared rows"
            )
            del possible[flow]
    return possible, reasons


def _blocker(config: ModelConfig, flow: Flow) -> str | None:
    """Why this model cannot run a flow; None if it can."""
    return flow_config(config, flow).plan.ced_blocker if FLOWS[flow][0] else None


def run_flow(
    flow: Flow, model: LoadedModel, prompt: Sequence[int], output_tokens: int, progress: Progress
) -> FlowRun:
    """Prefill the prompt, then decode greedily; every output token is stored, as the ledger counts.

    A short prefill and one step come first and are not measured.

    Raises:
        UsageError: an empty prompt or no output.
    """
    if not prompt or output_tokens < 1:
        raise UsageError("a comparison needs at least one input and one output token")
    mode: DecoderPrefill = "report" if FLOWS[flow][0] else "full"
    account = Account()
    _warm_up(model, prompt[:_WARM_UP_TOKENS], mode)
    with PeakMemory() as memory:
        state = model.new_state(len(prompt) + output_tokens)
        ids = torch.tensor([list(prompt)])
        begin = time.perf_counter()
        logits = _read(model, ids, state, mode, account, progress, flow)
        prefill_seconds = time.perf_counter() - begin
        output: list[int] = []
        begin = time.perf_counter()
        for number in range(output_tokens):
            output.append(int(logits.argmax()))
            logits = model.step(torch.tensor(output[-1:]), state, account)
            if number % 100 == 99:
                progress(f"{flow}: decoded {number + 1:,} of {output_tokens:,} tokens")
        decode_seconds = time.perf_counter() - begin
    return FlowRun(
        flow=flow,
        decoder_prefill=mode,
        account=account,
        kv_bytes=state.kv_bytes(),
        window_bytes=state.window_bytes(),
        persisted=persist(state, [*prompt, *output]),
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        peak_bytes=memory.peak_bytes,
        output_ids=tuple(output),
    )


def _warm_up(model: LoadedModel, prompt: Sequence[int], mode: DecoderPrefill) -> None:
    state = model.new_state(len(prompt) + 1)
    logits = model.prefill(torch.tensor([list(prompt)]), state, decoder_prefill=mode)
    model.step(logits.argmax(-1), state)


def persist(state: ModelState, token_ids: Sequence[int]) -> Persisted:
    """Write the complete blocks of a state's one sequence to a prefix store that is thrown away."""
    pool, root = state.pool, bytes(KEY_BYTES)
    keys = block_keys(root, token_ids, pool.block_size)
    parents = [chain_start(root), *keys]
    limit = 2 * pool.nbytes + 64 * 2**20
    with (
        tempfile.TemporaryDirectory(prefix="cedar-compare-") as made,
        PrefixStore(
            Path(made) / "store", root=root, limit_bytes=limit, record_bytes=pool.block_bytes
        ) as store,
    ):
        store.put_many(
            [
                Record(
                    key=key, parent=parents[number], start=number * pool.block_size,
                    tokens=pool.block_size,
                    payload=block_payload(pool, int(state.tables[0, number])),
                )
                for number, key in enumerate(keys)
            ]
        )  # fmt: skip
        store.flush()
        stats = store.stats()
        return Persisted(stats.counts.get("stored_bytes", 0), stats.bytes_on_disk)


def _read(
    model: LoadedModel, ids: torch.Tensor, state: Any, mode: DecoderPrefill, account: Account,
    progress: Progress, flow: Flow,
) -> torch.Tensor:  # fmt: skip
    """Prefill in one call; says how far it is between chunks."""

    def report(done: int) -> None:
        progress(f"{flow}: read {done:,} of {ids.shape[1]:,} prompt tokens")

    return model.prefill(ids, state, decoder_prefill=mode, account=account, progress=report)
