"""`EngineConfig`: every knob of the engine, named as in vLLM; its field docs are the CLI's help."""

from __future__ import annotations

from dataclasses import dataclass

from cedar.config.layer_plan import LayerPlan
from cedar.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and modes of one engine.

    Attributes:
        max_model_len: tokens one request may hold, prompt and output together.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: prompt tokens read per step, all requests together.
        block_size: tokens per block of the KV pool; a multiple of every compression ratio.
        num_blocks: blocks in the pool; None = enough for max_num_seqs requests of max_model_len.
        decoder_prefill: report, cut, exact or full; None = report where the plan allows CED.
        replay_windows: windows of prompt that report and cut run through the decoder.
        enable_prefix_caching: reuse global rows of equal prefixes.
        encoder_replay: how windows are rebuilt after a prefix hit, bounded or exact.
        prefix_store_dir: directory of the prefix store on disk; None = memory only. Switches
            enable_prefix_caching on.
        prefix_store_size: bytes that all files of the store may take together.
        prefix_store_windows: also store the windows at the end of prompts and answers: such a prefix
            goes on exactly and without a replay, and takes more bytes.
    """

    max_model_len: int = 4096
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    block_size: int = 128
    num_blocks: int | None = None
    decoder_prefill: str | None = None
    replay_windows: int = 1
    enable_prefix_caching: bool = False
    encoder_replay: str = "bounded"
    prefix_store_dir: str | None = None
    prefix_store_size: int = 8 << 30
    prefix_store_windows: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
                     "replay_windows"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}={value!r} must be an integer of at least 1")
        for name in ("enable_prefix_caching", "prefix_store_windows"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r} must be True or False")
        directory = self.prefix_store_dir
        if directory is not None and (not isinstance(directory, str) or not directory):
            raise UsageError(
                f"prefix_store_dir={directory!r} must be the path of a directory, or None"
            )
        size = self.prefix_store_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(
                f"prefix_store_size={size!r} must be a whole number of bytes, at least 1"
            )
        if self.prefix_store_windows and self.prefix_store_dir is None:
            raise UsageError(
                "prefix_store_windows has no effect without a store; give prefix_store_dir as well"
            )
        blocks = self.num_blocks
        if blocks is not None and (type(blocks) is not int or blocks < 1):
            raise UsageError(f"num_blocks={blocks!r} must be an integer of at least 1, or None")

    def check_positions(self, positions: int) -> None:
        """Refuse a length beyond the positions of a model, its `max_position_embeddings`.

        Raises:
            UsageError: `max_model_len` is larger.
        """
        if self.max_model_len > positions:
            raise UsageError(
                f"max_model_len={self.max_model_len} exceeds the model's "
                f"max_position_embeddings={positions}; lower max_model_len to at most {positions}"
            )

    @property
    def caches_prefixes(self) -> bool:
        """Whether prefixes are looked up and kept."""
        return self.enable_prefix_caching or self.prefix_store_dir is not None

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks a request of max_model_len tokens needs."""
        return -(-self.max_model_len // self.block_size)

    @property
    def pool_blocks(self) -> int:
        """Blocks of the pool."""
        if self.num_blocks is not None:
            return self.num_blocks
        return self.max_num_seqs * self.blocks_per_sequence

    def resolve_decoder_prefill(self, plan: LayerPlan) -> str:
        """The mode that runs: the one asked for, else report, else full where CED is impossible."""
        if self.decoder_prefill is not None:
            return self.decoder_prefill
        return "report" if plan.ced_blocker is None else "full"
