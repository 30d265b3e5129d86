"""`ForwardPass`: the phases of one model over slots of a state, and how each moves the state on.

    encode_chunk  encoder + KV projection of new (or replayed) tokens
    decode_rows   every decoder layer on the rows of a chunk or of a decode step
    replay        decoder layers on the last rows of a prompt, from the stashed boundary

Called by `loaded_model.py`. No validation of user input here; callers have done it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cedar.cache.cached_rows import CachedRows, CallRules
from cedar.cache.state import ModelState
from cedar.config.engram_hash import DEAD, EngramHash
from cedar.config.modes import IndexKeyRule
from cedar.engine.account import Account
from cedar.engine.phases import LayerRows
from cedar.model.causal_lm import Boundary, CausalLM
from cedar.model.spans import Spans


class EngramRows:
    """Table rows of tokens, from their ids and the ids before them.

    Args:
        constants: primes, offsets, multipliers.
        token_map: token id -> compressed id, int64 `[V]`.
    """

    def __init__(self, constants: EngramHash, token_map: npt.NDArray[np.int64]) -> None:
        self._constants, self._map = constants, token_map

    @property
    def lookback(self) -> int:
        """Ids before the first token that its rows depend on."""
        return self._constants.lookback

    def rows(self, before: Sequence[int], ids: Tensor) -> Tensor:
        """int64 `[T, layers, columns]` of `ids [T]`, preceded by the ids `before` (newest last)."""
        known = np.array(before[-self.lookback :] if self.lookback else [], dtype=np.int64)
        start = np.full(self.lookback - known.size, DEAD, dtype=np.int64)
        compressed = np.concatenate((start, self._map[known], self._map[ids.numpy()]))
        return torch.from_numpy(self._constants.rows(compressed))


class ForwardPass:
    """Phases of one model.

    Args:
        net: the backbone.
        engram: row numbers of n-gram memories; None without Engram layers.
        index_key_rule: see `CallRules`.
    """

    def __init__(
        self, net: CausalLM, engram: EngramRows | None, index_key_rule: IndexKeyRule
    ) -> None:
        self.net, self.plan, self.engram = net, net.plan, engram
        self._rule: IndexKeyRule = index_key_rule

    def rows(
        self,
        state: ModelState,
        spans: Spans,
        *,
        fresh_decoder: bool = False,
        decoding: bool = False,
    ) -> CachedRows:
        """Row store of one call; rows of tokens already stored are left alone.

        Args:
            decoding: a decode step; only there does the as-shipped key rule differ.
        """
        floors = tuple(state.slots[slot].length for slot in spans.sequences)
        rules = CallRules(
            global_floor=floors,
            fresh_decoder=fresh_decoder,
            index_key_rule=self._rule if decoding else "corrected",
        )
        return CachedRows(state, self.net.ops, rules)

    def read_chunk(
        self, pieces: Sequence[Tensor], state: ModelState, spans: Spans, account: Account, *,
        keep_boundary: int | None, all_rows: bool = False,
    ) -> Boundary | None:  # fmt: skip
        """Encode one chunk of prompt tokens and project its decoder rows.

        Args:
            pieces: ids of each sequence of `spans`.
            keep_boundary: boundary rows to stash per sequence for a later replay; None = run the
                decoder on every row now (`full`) and return the stream of each last row.
            all_rows: return the stream of every row instead (only without `keep_boundary`).
        """
        rows = self.rows(state, spans)
        engram = self._engram_rows(pieces, state, spans)
        boundary = self._encode(torch.cat(list(pieces)), rows, spans, engram, account)
        last = None
        if keep_boundary is None:
            steps = [LayerRows(spans.num_rows, spans.num_rows)] * len(self.plan.decoder)
            with account.replay.timed():
                last = self._decode(boundary, rows, spans, steps, engram, account, all_rows)
        else:
            self._stash(boundary, state, spans, keep_boundary)
        self._advance(pieces, state, spans, decoded=keep_boundary is None)
        self._publish(state, spans)
        return last

    def rewind(self, state: ModelState, slot: int, start: int, prefix_ids: Sequence[int]) -> None:
        """Place a sequence with restored global rows before tokens that will run again.

        Its windows start empty at `start`; its stored global rows stay as they are.

        Args:
            start: first position to run.   prefix_ids: ids of the stored tokens.
        """
        record = state.slots[slot]
        record.encoder_length = record.decoder_length = start
        record.encoder_floor = record.decoder_floor = start
        reach = 0 if self.engram is None else self.engram.lookback
        record.history = list(prefix_ids[max(0, start - reach) : start])

    def step(
        self, ids: Tensor, state: ModelState, slots: Sequence[int], account: Account
    ) -> Boundary:
        """One token of each slot through every layer; the stream leaving the last layer."""
        starts = tuple(state.slots[slot].encoder_length for slot in slots)
        spans = Spans(tuple(slots), starts, (1,) * len(starts))
        rows = self.rows(state, spans, decoding=True)
        pieces = list(ids.split(1))
        with account.decode.timed():
            engram = self._engram_rows(pieces, state, spans)
            boundary = self.net.encode(ids, spans, rows, engram)
            self.net.project_kv(boundary, spans, rows)
            last = self.net.decode(
                boundary, [(spans, spans)] * len(self.plan.decoder), rows, engram
            )
        account.decode.add(len(starts), len(self.plan))
        self._advance(pieces, state, spans, decoded=True)
        return last

    def replay(
        self, state: ModelState, slots: Sequence[int], steps: Sequence[LayerRows], account: Account
    ) -> Boundary:
        """Run the decoder on the last rows of each slot; the stream of each slot's last row."""
        out: dict[int, Boundary] = {}
        fresh = [slot for slot in slots if not self._continues(state, slot, steps)]
        going_on = [slot for slot in slots if slot not in fresh]
        with account.replay.timed():
            for group, is_fresh in ((fresh, True), (going_on, False)):
                if not group:
                    continue
                last = self._replay_group(state, group, steps, is_fresh, account)
                for row, slot in enumerate(group):
                    out[slot] = last.rows(torch.tensor([row]))
        return Boundary(
            torch.cat([out[slot].stream for slot in slots]),
            torch.cat([out[slot].pre for slot in slots]),
        )

    def _continues(self, state: ModelState, slot: int, steps: Sequence[LayerRows]) -> bool:
        """Whether the stash is too short to start over but reaches back to the decoder windows: new
        tokens after decode steps or a `full` call simply go on from the rings."""
        record = state.slots[slot]
        assert record.stash_stream is not None
        have, total = record.stash_stream.shape[0], record.encoder_length
        enough = have >= min(total, steps[0].write)
        return not enough and record.decoder_length >= total - have

    def _replay_group(
        self, state: ModelState, slots: list[int], steps: Sequence[LayerRows], fresh: bool,
        account: Account,
    ) -> Boundary:  # fmt: skip
        streams, pres, starts, counts = [], [], [], []
        for slot in slots:
            record = state.slots[slot]
            assert record.stash_stream is not None and record.stash_pre is not None
            count = record.encoder_length - record.decoder_length
            if fresh:
                count = min(record.stash_stream.shape[0], steps[0].write)
            streams.append(record.stash_stream[-count:])
            pres.append(record.stash_pre[-count:])
            starts.append(record.encoder_length - count)
            counts.append(count)
        spans = Spans(tuple(slots), tuple(starts), tuple(counts))
        rows = self.rows(state, spans, fresh_decoder=fresh)
        if not fresh:
            steps = [LayerRows(spans.num_rows, spans.num_rows)] * len(steps)
        boundary = Boundary(torch.cat(streams), torch.cat(pres))
        last = self._decode(boundary, rows, spans, steps, None, account)
        for slot, end, count in zip(slots, spans.ends, counts, strict=True):
            state.slots[slot].decoder_length = end
            if fresh:
                state.slots[slot].decoder_floor = end - min(count, steps[-1].write)
        return last

    def _encode(
        self, ids: Tensor, rows: CachedRows, spans: Spans, engram: Tensor | None, account: Account
    ) -> Boundary:
        with account.encode.timed():
            boundary = self.net.encode(ids, spans, rows, engram)
        account.encode.add(spans.num_rows, self.plan.num_encoder_layers)
        with account.project.timed():
            self.net.project_kv(boundary, spans, rows)
        account.project.add(spans.num_rows, len(self.plan.boundary_owners))
        return boundary

    def _decode(
        self, boundary: Boundary, rows: CachedRows, spans: Spans, steps: Sequence[LayerRows],
        engram: Tensor | None, account: Account, all_rows: bool = False,
    ) -> Boundary:  # fmt: skip
        """Decoder layers on `spans`; the last layer answers for each sequence's last row only."""
        pairs = [(spans.tail(step.write), spans.tail(step.query)) for step in steps[:-1]]
        last = spans.tail(steps[-1].write)
        pairs.append((last, last if all_rows else spans.tail(1)))
        token_layers = sum(write.num_rows for write, _ in pairs)
        account.replay.add(spans.num_rows, len(pairs), token_layers)
        return self.net.decode(boundary, pairs, rows, engram)

    def _stash(self, boundary: Boundary, state: ModelState, spans: Spans, keep: int) -> None:
        """Keep the last boundary rows of each sequence for the replay after the last chunk."""
        for slot, offset, count in zip(spans.sequences, spans.offsets, spans.counts, strict=True):
            record = state.slots[slot]
            stream = boundary.stream[offset : offset + count]
            pre = boundary.pre[offset : offset + count]
            if count < keep and record.stash_stream is not None and record.stash_pre is not None:
                stream = torch.cat((record.stash_stream, stream))
                pre = torch.cat((record.stash_pre, pre))
            record.stash_stream, record.stash_pre = stream[-keep:].clone(), pre[-keep:].clone()

    def _publish(self, state: ModelState, spans: Spans) -> None:
        """Note whose keys a prompt published last: those of the last owner that has any."""
        for slot in spans.sequences:
            record = state.slots[slot]
            owners = [s.layer_id for s in self.plan.kv_owners if s.compress_ratio <= record.length]
            record.published = owners[-1] if owners else None

    def _engram_rows(
        self, pieces: Sequence[Tensor], state: ModelState, spans: Spans
    ) -> Tensor | None:
        if self.engram is None:
            return None
        return torch.cat(
            [
                self.engram.rows(state.slots[slot].history, piece)
                for slot, piece in zip(spans.sequences, pieces, strict=True)
            ]
        )

    def _advance(
        self, pieces: Sequence[Tensor], state: ModelState, spans: Spans, *, decoded: bool
    ) -> None:
        reach = 0 if self.engram is None else self.engram.lookback
        for slot, end, piece in zip(spans.sequences, spans.ends, pieces, strict=True):
            record = state.slots[slot]
            record.encoder_length = end
            record.length = max(record.length, end)
            if decoded:
                record.decoder_length = end
                # A later stash must not be joined to boundary rows from before these tokens.
                record.stash_stream = record.stash_pre = None
            if reach:
                record.history = (record.history + piece[-reach:].tolist())[-reach:]
