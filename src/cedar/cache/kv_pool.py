"""The pool of packed global rows: one buffer of main rows and one of index keys per KV owner.

A block covers `block_size` tokens in every buffer at once, so one block table per sequence serves
all owners; an owner of ratio r keeps block_size / r rows per block. Reuse and Reindex layers own
nothing. Sizes come from `formats/rows.py`. Called by `state.py` and `cached_rows.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cedar.config.layer_plan import LayerPlan
from cedar.errors import DoesNotFitError, UsageError
from cedar.formats.rows import RowFormats
from cedar.kernels.operators import PagedRows
from cedar.units import format_bytes

DEFAULT_BLOCK_SIZE = 128

#: What a 64-bit size can say; torch refuses more in several other ways.
_MOST_BYTES = 2**63 - 1
#: torch has no class of its own for memory it did not get, only this name in a RuntimeError.
_ALLOCATOR = "DefaultCPUAllocator"


@contextmanager
def fits_memory(what: str, nbytes: int) -> Iterator[None]:
    """Turn the failure to allocate state tensors into an error that says what to lower.

    Raises:
        DoesNotFitError: torch could not allocate, or cannot even count the bytes.
    """
    refusal = DoesNotFitError(
        f"{what} would take {nbytes} bytes ({format_bytes(nbytes)}), which cannot be allocated "
        f"here; lower max_model_len, max_num_seqs or num_blocks"
    )
    if nbytes > _MOST_BYTES:
        raise refusal
    try:
        yield
    except RuntimeError as error:
        if _ALLOCATOR not in str(error):
            raise
        raise refusal from error


class KVPool:
    """Packed rows of all KV owners.

    Args:
        plan, formats: which owners there are and how wide their rows are.
        num_blocks: capacity.
        block_size: tokens per block; a multiple of every compression ratio.

    Attributes:
        main, index: owner layer id -> uint8 `[num_blocks * rows_per_block, row_bytes]`.
    """

    def __init__(
        self, plan: LayerPlan, formats: RowFormats, *, num_blocks: int, block_size: int
    ) -> None:
        if block_size < 1 or block_size % plan.ratio_lcm:
            raise UsageError(
                f"block_size={block_size} must be a positive multiple of {plan.ratio_lcm}, the least "
                f"common multiple of the plan's compression ratios, so that no block cuts a group"
            )
        self.block_size, self.num_blocks, self.formats = block_size, num_blocks, formats
        self.rows_per_block = {
            spec.layer_id: block_size // spec.compress_ratio for spec in plan.kv_owners
        }
        self.main: dict[int, Tensor] = {}
        self.index: dict[int, Tensor] = {}
        widths = formats.main.row_bytes + formats.index.row_bytes
        nbytes = num_blocks * sum(self.rows_per_block.values()) * widths
        with fits_memory(f"the KV pool of {num_blocks} blocks of {block_size} tokens", nbytes):
            for owner, per_block in self.rows_per_block.items():
                rows = num_blocks * per_block
                self.main[owner] = torch.zeros(rows, formats.main.row_bytes, dtype=torch.uint8)
                self.index[owner] = torch.zeros(rows, formats.index.row_bytes, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for t in (*self.main.values(), *self.index.values()))

    @property
    def block_bytes(self) -> int:
        """Bytes one block takes in all buffers together."""
        return self.nbytes // self.num_blocks if self.num_blocks else 0

    def paged_main(self, owner: int, tables: Tensor) -> PagedRows:
        """Main rows of an owner under the given block tables, int32 `[S, B]`."""
        return PagedRows(self.main[owner], tables, self.rows_per_block[owner], self.formats.main)

    def paged_index(self, owner: int, tables: Tensor) -> PagedRows:
        """Index keys of an owner under the given block tables."""
        return PagedRows(self.index[owner], tables, self.rows_per_block[owner], self.formats.index)

    def row_numbers(self, owner: int, tables: Tensor, sequences: Tensor, rows: Tensor) -> Tensor:
        """Pool rows of row `rows[i]` of sequence `sequences[i]`, int64 `[n]`."""
        per_block = self.rows_per_block[owner]
        blocks = tables[sequences.long(), rows // per_block].long()
        return blocks * per_block + rows % per_block
