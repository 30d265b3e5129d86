"""`LoadedModel`: prefill, step and score over explicit state; what `cedar.load` returns.

Validates calls, rebuilds windows after a restored prefix, cuts prompts into chunks. The phases
themselves are in `forward.py`. Knows nothing of requests, text or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.cache.state import ModelState
from cedar.config.modes import IndexKeyRule
from cedar.engine.account import Account
from cedar.engine.forward import EngramRows, ForwardPass
from cedar.engine.phases import (
    DecoderPrefill,
    EncoderReplay,
    boundary_rows,
    check_choice,
    check_decoder_prefill,
    encoder_replay_rows,
    replay_rows,
)
from cedar.errors import RequestError, UsageError
from cedar.kernels.operators import Operators
from cedar.model.causal_lm import Boundary, CausalLM
from cedar.model.dense_rows import DenseRows
from cedar.model.spans import Spans

#: Rows of one prefill chunk, all sequences together: bounds scratch memory whatever the prompt.
PREFILL_CHUNK_ROWS = 2048

TokenIds = Tensor | Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """How a prompt is read.

    Attributes:
        decoder_prefill, replay_windows: which rows run through the decoder, see `phases.py`.
        encoder_replay, encoder_replay_windows: how windows are rebuilt after a prefix hit.
        chunk_rows: rows per chunk, all sequences together.
    """

    decoder_prefill: DecoderPrefill = "full"
    replay_windows: int = 1
    encoder_replay: EncoderReplay = "bounded"
    encoder_replay_windows: int = 1
    chunk_rows: int = PREFILL_CHUNK_ROWS


def _quiet(done: int) -> None:
    """Progress that nobody asked for."""


class LoadedModel:
    """A model ready to run.

    Args:
        net: the backbone with its weights.
        engram: n-gram rows of tokens; None without Engram layers.
        index_key_rule: "corrected" (every index source scores its own owner's keys) or
            "as_shipped" (the released reference program's decode steps, specification 7.2).
    """

    def __init__(
        self,
        net: CausalLM,
        *,
        engram: EngramRows | None = None,
        index_key_rule: IndexKeyRule = "corrected",
    ) -> None:
        check_choice("index_key_rule", index_key_rule, IndexKeyRule)
        self.net, self.config, self.plan = net, net.config, net.config.plan
        self.index_key_rule: IndexKeyRule = index_key_rule
        self.forward = ForwardPass(net, engram, index_key_rule)

    @property
    def ops(self) -> Operators:
        """The kernel backend."""
        return self.net.ops

    def new_state(self, max_tokens: int, batch: int = 1) -> ModelState:
        """Empty state for `batch` sequences of up to `max_tokens` tokens each."""
        return ModelState.contiguous(self.config, max_tokens=max_tokens, batch=batch)

    @torch.inference_mode()
    def score(self, ids: Tensor) -> Tensor:
        """Logits of every position without a cache: the oracle every cached path is compared with.

        Args:
            ids: int64 `[B, T]`.
        Returns: float32 `[B, T, V]`.
        """
        rows = self._ids(ids)
        batch, length = len(rows), rows[0].shape[0]
        if any(row.shape[0] != length for row in rows):
            raise UsageError("score needs sequences of one length; call it once per length")
        if length == 0:
            raise RequestError("score needs at least one token per sequence", param="ids")
        engram = self.forward.engram
        memory = None if engram is None else torch.cat([engram.rows((), row) for row in rows])
        dense = self.dense_rows(batch, length)
        last = self.net.forward_dense(torch.stack(rows), dense, memory)
        return self.net.logits(last).unflatten(0, (batch, length))

    def dense_rows(self, batch: int, length: int) -> DenseRows:
        """Row store of an uncached forward over `[batch, length]` tokens."""
        scale = self.config.head_dim**-0.5
        return DenseRows(self.plan, batch=batch, length=length, scale=scale)

    def prefill(
        self,
        ids: TokenIds,
        state: ModelState,
        decoder_prefill: DecoderPrefill = "full",
        replay_windows: int = 1,
        *,
        prefix_ids: TokenIds | None = None,
        encoder_replay: EncoderReplay = "bounded",
        encoder_replay_windows: int = 1,
        chunk_rows: int = PREFILL_CHUNK_ROWS,
        account: Account | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Read tokens of every sequence of `state`, going on where it stands.

        Args:
            ids: int64 `[B, T]`, or one 1-D tensor per sequence (lengths may differ). May be empty
                only after a restored prefix that is the whole prompt.
            decoder_prefill, replay_windows: which rows run through the decoder.
            prefix_ids: the tokens of a restored prefix (`ModelState.prefix`).
            encoder_replay, encoder_replay_windows: how a restored prefix's windows are rebuilt.
            chunk_rows: rows per chunk, all sequences together.
            account: receives tokens, layers and seconds of each phase.
            progress: called after each chunk with the tokens read so far, of the longest sequence.
        Returns: float32 `[B, V]`, logits of each sequence's last position.

        Raises:
            UsageError: an option cannot be honoured.   RequestError: ids are wrong.
            DoesNotFitError: the state is too small.
        """
        options = PrefillOptions(
            decoder_prefill=decoder_prefill,
            replay_windows=replay_windows,
            encoder_replay=encoder_replay,
            encoder_replay_windows=encoder_replay_windows,
            chunk_rows=chunk_rows,
        )
        prefix = None if prefix_ids is None else self._ids(prefix_ids)
        new, account = self._ids(ids), account or Account()
        return self._prefill(new, state, options, account, prefix, progress or _quiet)

    @torch.inference_mode()
    def _prefill(
        self, new: Sequence[Tensor], state: ModelState, options: PrefillOptions, account: Account,
        prefix: Sequence[Tensor] | None, progress: Callable[[int], None],
    ) -> Tensor:  # fmt: skip
        check_decoder_prefill(self.plan, options.decoder_prefill, options.replay_windows)
        if options.chunk_rows < 1:
            raise UsageError(f"chunk_rows={options.chunk_rows} must be at least 1")
        slots = range(len(state.slots))
        self._check_prefill(new, state, slots, prefix)
        steps = replay_rows(self.plan, options.decoder_prefill, options.replay_windows)
        keep = None if options.decoder_prefill == "full" else steps[0].write
        pending: dict[int, Tensor] = {}
        for i, slot in enumerate(slots):
            replayed = new[i][:0]
            if state.slots[slot].encoder_length < state.slots[slot].length:
                assert prefix is not None
                wanted = boundary_rows(
                    self.plan, options.decoder_prefill, options.replay_windows,
                    suffix=new[i].shape[0],
                )  # fmt: skip
                decoder_rows = min(wanted, state.slots[slot].length + new[i].shape[0])
                replayed = self._rewind(
                    state, slot, prefix[i], new[i].shape[0], decoder_rows, options
                )
            pending[slot] = torch.cat((replayed, new[i]))
        last: dict[int, Boundary] = {}
        share = max(1, options.chunk_rows // len(slots))
        while active := [slot for slot in slots if pending[slot].shape[0]]:
            pieces = [pending[slot][:share] for slot in active]
            starts = tuple(state.slots[slot].encoder_length for slot in active)
            spans = Spans(tuple(active), starts, tuple(piece.shape[0] for piece in pieces))
            out = self.forward.read_chunk(pieces, state, spans, account, keep_boundary=keep)
            for row, slot in enumerate(active):
                pending[slot] = pending[slot][share:]
                if out is not None:
                    last[slot] = out.rows(torch.tensor([row]))
            progress(max(slot.encoder_length for slot in state.slots))
        if keep is not None:
            return self.net.logits(self.forward.replay(state, slots, steps, account))
        return self.net.logits(
            Boundary(
                torch.cat([last[slot].stream for slot in slots]),
                torch.cat([last[slot].pre for slot in slots]),
            )
        )

    @torch.inference_mode()
    def step(self, ids: Tensor, state: ModelState, account: Account | None = None) -> Tensor:
        """Decode one token of every sequence of `state`.

        Args:
            ids: int64 `[B]`, the token each sequence goes on with.
        Returns: float32 `[B, V]`, logits after that token.
        """
        slots = range(len(state.slots))
        rows = self._ids(ids.unsqueeze(-1) if ids.dim() == 1 else ids)
        if len(rows) != len(slots) or any(row.shape != (1,) for row in rows):
            raise UsageError(
                f"step needs one token per sequence, {len(slots)}, got {list(ids.shape)}"
            )
        for slot in slots:
            if state.slots[slot].encoder_length < state.slots[slot].length:
                raise UsageError(
                    f"sequence {slot} holds a restored prefix without windows; call prefill with "
                    f"prefix_ids before step"
                )
            state.check_room(slot, 1)
        account = account or Account()
        return self.net.logits(self.forward.step(torch.cat(rows), state, slots, account))

    def _ids(self, ids: TokenIds) -> list[Tensor]:
        """One int64 1-D tensor per sequence, every id checked."""
        if isinstance(ids, Tensor) and ids.dim() != 2:
            raise UsageError(f"ids must be [batch, tokens], got shape {list(ids.shape)}")
        for row in ids:
            if row.dtype.is_floating_point or row.dtype == torch.bool:
                raise UsageError(f"ids must be integers, got {row.dtype}; convert them to int64")
        rows = [row.to(torch.int64) for row in ids]
        for row in rows:
            bad = (row < 0) | (row >= self.config.vocab_size)
            if bool(bad.any()):
                raise RequestError(
                    f"token id {int(row[bad][0])} is not in the vocabulary; allowed "
                    f"0..{self.config.vocab_size - 1}",
                    param="ids",
                )
        return rows

    def _check_prefill(
        self, new: Sequence[Tensor], state: ModelState, slots: Sequence[int],
        prefix: Sequence[Tensor] | None,
    ) -> None:  # fmt: skip
        if len(new) != len(slots):
            raise UsageError(f"prefill got {len(new)} sequences for a state of {len(slots)}")
        if prefix is not None and len(prefix) != len(slots):
            raise UsageError(
                f"prefix_ids holds {len(prefix)} sequences for a state of {len(slots)}; pass one per "
                f"sequence"
            )
        for i, slot in enumerate(slots):
            record = state.slots[slot]
            restored = record.encoder_length < record.length
            if restored and (prefix is None or prefix[i].shape[0] != record.length):
                raise UsageError(
                    f"sequence {slot} was restored with {record.length} prefix tokens; pass exactly "
                    f"those as prefix_ids so that its windows can be rebuilt"
                )
            if prefix is not None and not restored:
                raise UsageError(
                    f"prefix_ids was given but sequence {slot} holds no restored prefix; leave it out"
                )
            if not restored and new[i].shape[0] == 0:
                raise RequestError("prefill needs at least one token per sequence", param="ids")
            state.check_room(slot, new[i].shape[0])

    def _rewind(
        self, state: ModelState, slot: int, prefix: Tensor, suffix: int, decoder_rows: int,
        options: PrefillOptions,
    ) -> Tensor:  # fmt: skip
        """Place a restored sequence before its replayed tokens; return those tokens."""
        rows = encoder_replay_rows(
            self.plan, options.encoder_replay, windows=options.encoder_replay_windows,
            decoder_rows=decoder_rows, suffix=suffix,
        )  # fmt: skip
        start = max(0, state.slots[slot].length - rows)
        self.forward.rewind(state, slot, start, prefix.tolist())
        return prefix[start:]
