"""`Runner`: a `Batch` -> tensors -> model phases -> sampled tokens. The only engine file with tensors.

Called by `engine.py`. It owns the state of all slots; the scheduler only knows block ids.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.cache.transfer import copy_windows, load_windows
from cedar.config.engine_config import EngineConfig
from cedar.engine.account import Account
from cedar.engine.batch import Batch, PrefillChunk
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.phases import (
    check_decoder_prefill,
    kept_boundary_rows,
    replay_rows,
    window_layers,
)
from cedar.engine.request import Request
from cedar.engine.sampler import Sampled, TokenCounts, new_generator, prompt_logprobs, sample
from cedar.model.causal_lm import Boundary
from cedar.model.spans import Spans

#: Prompt rows whose logits are held at once; a row is as long as the vocabulary.
_LOGIT_ROWS = 64


class Runner:
    """Runs batches of one engine.

    Args:
        model: what to run.   config: limits and modes.

    Attributes:
        account: work of all phases since the engine started.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        mode = config.resolve_decoder_prefill(model.plan)
        check_decoder_prefill(model.plan, mode, config.replay_windows)
        self._model, self.decoder_prefill, self.account = model, mode, Account()
        self._steps = replay_rows(model.plan, mode, config.replay_windows)  # type: ignore[arg-type]
        self._keep = None if mode == "full" else self._steps[0].write
        self._window_layers = 0  # of the windows that are kept
        if config.caches_prefixes:
            self._window_layers = window_layers(model.plan, mode)  # type: ignore[arg-type]
        self._keeps_boundary = bool(
            kept_boundary_rows(model.plan, mode, config.replay_windows)  # type: ignore[arg-type]
        )
        self.state = ModelState(
            model.config,
            num_slots=config.max_num_seqs,
            num_blocks=config.pool_blocks,
            max_blocks=config.blocks_per_sequence,
            block_size=config.block_size,
        )
        self._generators: dict[str, torch.Generator] = {}
        self._counts: dict[str, TokenCounts] = {}

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[tuple[Request, Sampled]]:
        """Run one step; tokens of the requests that got one."""
        for request in (*(chunk.request for chunk in batch.prefills), *batch.decodes):
            self._place(request)
        results: list[tuple[Request, Sampled]] = []
        scored = [chunk for chunk in batch.prefills if chunk.request.wants_prompt_logprobs]
        plain = [chunk for chunk in batch.prefills if not chunk.request.wants_prompt_logprobs]
        if plain:
            results += self._prefill(plain)
        if scored:
            results += self._prefill_scored(scored)
        if batch.decodes:
            results += self._decode(batch.decodes)
        return results

    def forget(self, request: Request) -> None:
        """Drop what is kept for a finished request."""
        self._generators.pop(request.request_id, None)
        self._counts.pop(request.request_id, None)

    def _place(self, request: Request) -> None:
        """Write the block table of a request; set its slot up after admission."""
        slot = _slot(request)
        blocks = torch.tensor(request.block_ids, dtype=torch.int32)
        self.state.tables[slot, : blocks.shape[0]] = blocks
        if request.is_placed:
            return
        self.state.reset(slot)
        if request.started is None:
            request.started = time.monotonic()
        if request.cached_tokens:
            self.state.slots[slot].length = request.cached_tokens
            prefix = request.prompt_ids[: request.cached_tokens]
            self._model.forward.rewind(self.state, slot, request.read, prefix)
            if request.restored_windows is not None:
                load_windows(self.state, slot, self._window_layers, request.restored_windows)
                request.restored_windows = None
        request.is_placed = True

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> list[tuple[Request, Sampled]]:
        pieces, spans = _rows_of(chunks)
        slots, forward = spans.sequences, self._model.forward
        last = forward.read_chunk(pieces, self.state, spans, self.account, keep_boundary=self._keep)
        for chunk in chunks:
            chunk.request.read += chunk.count
            self._keep_windows(chunk.request, chunk.request.window_stops)
        ending = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        if not ending:
            return []
        if last is None:
            last = forward.replay(self.state, [slots[i] for i in ending], self._steps, self.account)
        else:
            last = last.rows(torch.tensor(ending))
        requests = [chunks[i].request for i in ending]
        return self._sample(requests, self._model.net.logits(last))

    def _prefill_scored(self, chunks: Sequence[PrefillChunk]) -> list[tuple[Request, Sampled]]:
        """Read prompts with every row through the decoder and keep what each row predicts."""
        pieces, spans = _rows_of(chunks)
        out = self._model.forward.read_chunk(
            pieces, self.state, spans, self.account, keep_boundary=None, all_rows=True
        )
        assert out is not None
        results: list[tuple[Request, Sampled]] = []
        for chunk, offset in zip(chunks, spans.offsets, strict=True):
            chunk.request.read += chunk.count
            self._keep_windows(chunk.request, chunk.request.window_stops)
            rows = Boundary(
                out.stream[offset : offset + chunk.count], out.pre[offset : offset + chunk.count]
            )
            self._score(chunk, rows)
            if chunk.is_last:
                last = self._model.net.logits(rows.rows(torch.tensor([chunk.count - 1])))
                results += self._sample([chunk.request], last)
        return results

    def _score(self, chunk: PrefillChunk, rows: Boundary) -> None:
        request = chunk.request
        count = request.params.prompt_logprobs
        assert count is not None
        if chunk.start == 0:  # also after a preemption, when the prompt is read again
            request.prompt_logprobs = [None]
        following = request.prompt_ids[chunk.start + 1 : chunk.start + 1 + chunk.count]
        for begin in range(0, len(following), _LOGIT_ROWS):
            tokens = following[begin : begin + _LOGIT_ROWS]
            part = rows.rows(torch.arange(begin, begin + len(tokens)))
            request.prompt_logprobs += prompt_logprobs(self._model.net.logits(part), tokens, count)

    def _decode(self, requests: Sequence[Request]) -> list[tuple[Request, Sampled]]:
        ids = torch.tensor([request.next_token for request in requests])
        slots = [_slot(request) for request in requests]
        last = self._model.forward.step(ids, self.state, slots, self.account)
        for request in requests:
            request.redone += 1
            size = self.state.pool.block_size
            self._keep_windows(request, [request.length // size * size])
        return self._sample(requests, self._model.net.logits(last))

    def _keep_windows(self, request: Request, positions: Sequence[int]) -> None:
        """Copy a request's windows if it has just come to a position; of an answer, the last ones."""
        position = request.length
        if not self._window_layers or position not in positions:
            return
        windows = copy_windows(
            self.state, _slot(request), self._window_layers, boundary=self._keeps_boundary
        )
        if windows is not None:
            size = len(request.prompt_ids)
            request.windows = {at: kept for at, kept in request.windows.items() if at <= size}
            request.windows[position] = windows

    def _sample(self, requests: Sequence[Request], logits: Tensor) -> list[tuple[Request, Sampled]]:
        """Sample the requests that are up to date; one being fed again already has its token."""
        results = []
        for request, row in zip(requests, logits, strict=True):
            if request.redone < len(request.output_ids):
                continue
            name, params = request.request_id, request.params
            if name not in self._generators:
                self._generators[name] = new_generator(params, request.index)
                if params.has_penalties:
                    self._counts[name] = TokenCounts(request.prompt_ids, row.shape[0])
            drawn = sample(
                row, params, output=request.output_ids, counts=self._counts.get(name),
                end_ids=request.end_ids, generator=self._generators[name],
            )  # fmt: skip
            results.append((request, drawn))
        return results


def _rows_of(chunks: Sequence[PrefillChunk]) -> tuple[list[Tensor], Spans]:
    """Token ids of chunks, and where their rows belong."""
    pieces = [torch.tensor(c.request.prompt_ids[c.start : c.start + c.count]) for c in chunks]
    slots = tuple(_slot(chunk.request) for chunk in chunks)
    return pieces, Spans(slots, tuple(c.start for c in chunks), tuple(c.count for c in chunks))


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot
