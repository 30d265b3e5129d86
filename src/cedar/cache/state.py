"""`ModelState`: everything that sequences carry from one call to the next.

    global rows    packed, paged, shared pool; grow with the sequence
    window rings   one ring of `sliding_window` packed rows per layer and sequence
    open groups    up to ratio - 1 raw float32 rows per owner and sequence
    history        the last ids an Engram hash looks back to
    boundary stash rows between encoder and decoder that a later bounded replay will need

Slots are sequences of one batch. The model never sees this; `cached_rows.py` reads and writes it,
`engine/loaded_model.py` moves it forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cedar.cache.kv_pool import DEFAULT_BLOCK_SIZE, KVPool, fits_memory
from cedar.config.model_config import ModelConfig
from cedar.errors import DoesNotFitError, UsageError
from cedar.formats.rows import RowFormats


@dataclass
class Slot:
    """Bookkeeping of one sequence.

    Attributes:
        length: tokens whose global rows are stored.
        encoder_length, decoder_length: tokens whose windows the encoder / decoder rings hold the
            end of; below `length` after a prefix was restored without windows.
        encoder_floor, decoder_floor: first position the rings know; earlier ones are absent.
        stash_stream, stash_pre: boundary rows of the last prompt positions, `[k, C, D]`, `[k, C]`;
            None once the sequence has decoded.
        history: last token ids, newest last, at most the Engram look-back.
        published: owner whose index keys were written last; the as-shipped key rule reads it.
    """

    length: int = 0
    encoder_length: int = 0
    decoder_length: int = 0
    encoder_floor: int = 0
    decoder_floor: int = 0
    stash_stream: Tensor | None = None
    stash_pre: Tensor | None = None
    history: list[int] = field(default_factory=list)
    published: int | None = None


class ModelState:
    """State of a batch of sequences over one pool.

    Args:
        config: the model.
        num_slots: sequences.
        num_blocks: capacity of the pool.
        max_blocks: blocks one sequence may use.
        block_size: tokens per block.
    """

    def __init__(
        self, config: ModelConfig, *, num_slots: int, num_blocks: int, max_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> None:  # fmt: skip
        self.config, self.plan = config, config.plan
        self.formats = RowFormats.of(config)
        self.pool = KVPool(self.plan, self.formats, num_blocks=num_blocks, block_size=block_size)
        window, row_bytes = self.plan.sliding_window, self.formats.window.row_bytes
        rings = (len(self.plan), num_slots, window, row_bytes)
        nbytes = 4 * num_slots * max_blocks + math.prod(rings)
        with fits_memory(f"block tables and windows of {num_slots} sequences", nbytes):
            self.tables = torch.zeros(num_slots, max_blocks, dtype=torch.int32)
            self.rings = torch.zeros(rings, dtype=torch.uint8)
        self.slots = [Slot() for _ in range(num_slots)]
        # Views, one per layer: rows of all slots after each other.
        self.ring_rows = self.rings.flatten(1, 2).unbind()
        self.open_kv: dict[int, Tensor] = {}
        self.open_gate: dict[int, Tensor] = {}
        for spec in self.plan.kv_owners:
            if spec.compress_ratio > 1:
                shape = (num_slots, spec.compress_ratio - 1, config.head_dim)
                self.open_kv[spec.layer_id] = torch.zeros(shape)
                self.open_gate[spec.layer_id] = torch.zeros(shape)

    @classmethod
    def contiguous(
        cls, config: ModelConfig, *, max_tokens: int, batch: int, block_size: int | None = None
    ) -> ModelState:
        """A state with a private run of blocks per sequence.

        Args:
            max_tokens: tokens each sequence may grow to.   batch: sequences.
        """
        for name, value in (("max_tokens", max_tokens), ("batch", batch)):
            if value < 1:
                raise UsageError(f"{name}={value} must be at least 1")
        if block_size is None:
            lcm = config.plan.ratio_lcm
            block_size = -(-DEFAULT_BLOCK_SIZE // lcm) * lcm
        blocks = -(-max_tokens // block_size)
        state = cls(
            config, num_slots=batch, num_blocks=batch * blocks, max_blocks=blocks,
            block_size=block_size,
        )  # fmt: skip
        state.tables.copy_(torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks))
        return state

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens stored per sequence."""
        return tuple(slot.length for slot in self.slots)

    @property
    def max_tokens(self) -> int:
        """Tokens one sequence may grow to."""
        return self.tables.shape[1] * self.pool.block_size

    def reset(self, slot: int) -> None:
        """Make a slot an empty sequence; old ring and group contents become unreachable."""
        self.slots[slot] = Slot()

    def check_room(self, slot: int, new_tokens: int) -> None:
        """Refuse tokens that would not fit.

        Raises:
            DoesNotFitError: names the need, the limit and the remedy.
        """
        need = self.slots[slot].length + new_tokens
        if need > self.max_tokens:
            raise DoesNotFitError(
                f"sequence {slot} would hold {need} tokens ({self.slots[slot].length} stored + "
                f"{new_tokens} new) but its state has room for {self.max_tokens}; create it with "
                f"new_state(max_tokens={need}) or more"
            )

    def kv_bytes(self) -> int:
        """Bytes of global rows in use: stored rows of every owner times the size of a stored row."""
        total = 0
        for spec in self.plan.kv_owners:
            rows = sum(slot.length // spec.compress_ratio for slot in self.slots)
            for buffer in (self.pool.main[spec.layer_id], self.pool.index[spec.layer_id]):
                total += rows * buffer.stride(0) * buffer.element_size()
        return total

    def window_bytes(self) -> int:
        """Bytes of window rings of the sequences in use, all backbone layers."""
        used = sum(1 for slot in self.slots if slot.length)
        return used * self.rings[:, 0].nbytes

    def prefix(self, num_tokens: int) -> ModelState:
        """A new state that holds only the global rows of the first tokens of every sequence.

        That is what a prefix cache keeps: no windows, no open groups, no boundary rows. The next
        `prefill` must be given `prefix_ids` to rebuild the windows.

        Raises:
            UsageError: a sequence is shorter than `num_tokens`, or it is not positive.
        """
        if num_tokens < 1 or any(num_tokens > slot.length for slot in self.slots):
            raise UsageError(
                f"prefix({num_tokens}) is not possible: sequences hold {list(self.lengths)} tokens; "
                f"allowed 1..{min(self.lengths)}"
            )
        blocks = self.tables.shape[1]
        hit = ModelState.contiguous(
            self.config,
            max_tokens=self.max_tokens,
            batch=len(self.slots),
            block_size=self.pool.block_size,
        )
        assert hit.tables.shape[1] == blocks
        for spec in self.plan.kv_owners:
            rows = torch.arange(num_tokens // spec.compress_ratio)
            for slot in range(len(self.slots)):
                owner, sequence = spec.layer_id, torch.full_like(rows, slot)
                source = self.pool.row_numbers(owner, self.tables, sequence, rows)
                target = hit.pool.row_numbers(owner, hit.tables, sequence, rows)
                hit.pool.main[owner][target] = self.pool.main[owner][source]
                hit.pool.index[owner][target] = self.pool.index[owner][source]
        for record in hit.slots:
            record.length = num_tokens
        return hit
