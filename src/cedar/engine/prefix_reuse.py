"""`PrefixReuse`: which stored blocks a request may start from, and which it leaves findable.

Pure accounting between the scheduler and the block pool; no tensors, no text. A hit is the longest
run of leading blocks whose global rows are all there. The windows at the end of recent prompts and
answers are kept in memory, with `prefix_store_windows` on disk as well, and the encoder goes on from
there. Without them it runs again on the tokens before the hit's end (`phases.encoder_replay_rows`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from cedar.cache.block_pool import BlockPool
from cedar.cache.hashing import block_keys, chain_start, next_key
from cedar.cache.window_cache import WindowCache, Windows
from cedar.config.engine_config import EngineConfig
from cedar.config.layer_plan import LayerPlan
from cedar.engine.phases import (
    boundary_rows,
    encoder_replay_rows,
    kept_boundary_rows,
    last_resume,
)
from cedar.engine.request import Request


class BlockTier(Protocol):
    """Blocks beyond memory, see `disk_tier.DiskTier`."""

    def count_leading(self, keys: Sequence[bytes], max_depth: int | None) -> int:
        """How many leading blocks are worth loading."""
        ...

    def load(
        self, keys: Sequence[bytes], blocks: Sequence[int], max_depth: int | None
    ) -> list[int]:
        """Fill blocks; the replay depths of the leading ones that were filled."""
        ...

    def save(
        self, start_key: bytes, keys: Sequence[bytes], blocks: Sequence[int], depths: Sequence[int]
    ) -> None:
        """Keep a copy of a sequence's full blocks."""
        ...

    def load_windows(
        self, keys: Sequence[bytes], max_depth: int | None
    ) -> tuple[int, int, bytes] | None:
        """Windows at the end of the last block that has any: its index, replay depth, payload."""
        ...

    def save_windows(self, key: bytes, position: int, depth: int, payload: bytes) -> None:
        """Keep the windows at the end of a block."""
        ...


class PrefixReuse:
    """Prefix cache policy of one engine.

    Args:
        plan: window and layers decide how much is replayed.   config: modes.
        pool: where blocks are found.   windows: where windows are.
        root: fingerprint of everything rows depend on besides tokens.
        tier: blocks on disk; None = memory only.
    """

    def __init__(
        self, plan: LayerPlan, config: EngineConfig, pool: BlockPool, windows: WindowCache,
        root: bytes, tier: BlockTier | None = None,
    ) -> None:  # fmt: skip
        self._plan, self._config, self._pool, self._root = plan, config, pool, root
        self._windows, self._tier = windows, tier
        mode = config.resolve_decoder_prefill(plan)
        self._kept_rows = kept_boundary_rows(plan, mode, config.replay_windows)  # type: ignore[arg-type]

    def adopt(self, request: Request) -> list[int]:
        """Take the blocks a new request starts from; each gets a reference.

        Sets the request's `keys`, `matched_tokens`, `cached_tokens`, `miss_reason`, `depth`,
        `window_stops` and `read` (where the encoder starts again, before the end of the hit).
        """
        config = self._config
        request.matched_tokens = request.cached_tokens = request.replayed_tokens = 0
        request.depth = 0
        request.window_stops = self._window_stops(request)
        if request.keys:  # it has waited or was preempted: keys of its answer are not looked up
            del request.keys[len(request.prompt_ids) // config.block_size :]
        else:
            request.keys = block_keys(
                self._root, request.prompt_ids, config.block_size, request.cache_salt
            )
        exact = config.encoder_replay == "exact"
        max_depth = 0 if exact else None
        found = self._find(request, max_depth)
        request.matched_tokens = len(found) * config.block_size
        request.miss_reason = self._why_not(request)
        if request.miss_reason is not None:
            self._pool.release(found)
            return []
        request.cached_tokens = request.matched_tokens
        request.read = max(
            0, request.cached_tokens - self._replayed(request, config.encoder_replay)
        )
        request.depth = max(self._pool.depth_of(block) for block in found)
        has_windows = self._restore_windows(request, max_depth) or self._load_windows(
            request, max_depth
        )
        if not has_windows and request.read > 0 and not exact:
            request.depth += 1
        request.replayed_tokens = request.cached_tokens - request.read
        return found

    def _window_stops(self, request: Request) -> tuple[int, ...]:
        """Where a prompt's windows are kept: in memory at the last block end, on disk before it.

        Boundary rows stay in memory, so what is stored must leave the decoder all it replays. A
        block end that no hit can go on from is left out.
        """
        size, last = self._config.block_size, self._last_resume(request)
        ends = {min(len(request.prompt_ids) - 1, last + self._kept_rows) // size * size}
        if self._config.prefix_store_windows:
            ends.add(last // size * size)
        return tuple(sorted(end for end in ends if end > self._plan.sliding_window))

    def _restore_windows(self, request: Request, max_depth: int | None) -> bool:
        """Go on from windows in memory if that runs no more rows than the replay would."""
        size, last = self._config.block_size, self._last_resume(request)
        end = min(request.cached_tokens, len(request.prompt_ids) - 1) // size
        first = max(1, -(-request.read // size))
        for number in range(end, first - 1, -1):
            key = request.keys[number - 1]
            found = self._windows.get(key, max_depth)
            if found is None or number * size - found[1].boundary_rows > last:
                continue
            self._windows.touch(key)
            depth, request.restored_windows = found
            request.read = number * size
            request.depth = max(request.depth, depth)
            return True
        return False

    def _load_windows(self, request: Request, max_depth: int | None) -> bool:
        """Go on from stored windows if that runs no more rows again than an exact replay would."""
        config, size = self._config, self._config.block_size
        if self._tier is None or not config.prefix_store_windows:
            return False
        last = min(request.cached_tokens, self._last_resume(request)) // size
        first = max(0, request.cached_tokens - self._replayed(request, "exact") - 1) // size
        if last <= first:
            return False
        found = self._tier.load_windows(request.keys[first:last], max_depth)
        if found is None:
            return False
        number, depth, rings = found
        request.restored_windows = Windows(rings)
        request.read = (first + number + 1) * size
        request.depth = max(request.depth, depth)
        return True

    def _find(self, request: Request, max_depth: int | None) -> list[int]:
        """The leading blocks that are in memory or on disk, each with a reference taken."""
        size = self._config.block_size
        found = self._pool.longest_prefix(request.keys, max_depth)
        for block in found:
            self._pool.acquire(block)
        request.disk_tokens, request.disk_seconds = 0, 0.0
        rest = request.keys[len(found) :]
        # Nothing is read for a request that takes no rows, or that cannot be admitted now.
        lacking = -(-len(request.token_ids) // size) - len(found)
        if (
            self._tier is None or not rest or request.wants_prompt_logprobs
            or lacking > self._pool.num_free
        ):  # fmt: skip
            return found
        count = self._tier.count_leading(rest, max_depth)
        fresh = self._pool.allocate(count)
        assert fresh is not None
        begin = time.monotonic()
        depths = self._tier.load(rest[:count], fresh, max_depth)
        request.disk_seconds = time.monotonic() - begin
        self._pool.release(fresh[len(depths) :])
        for block, key, depth in zip(fresh, rest, depths, strict=False):
            known = self._pool.publish(block, key, depth)
            if known != block:  # memory had lost a block before this one, but not this one
                self._pool.acquire(known)
                self._pool.release([block])
            found.append(known)
        request.disk_tokens = len(depths) * size
        return found

    def save(self, request: Request) -> None:
        """Keep a request's windows, and hand its full blocks to the tier beyond memory."""
        self._save_blocks(request)
        size, last = self._config.block_size, self._last_resume(request)
        for position, windows in request.windows.items():
            key = request.keys[position // size - 1]
            if position >= max(request.window_stops, default=0):
                self._windows.put(key, request.depth, windows)
            if self._tier is None or not self._config.prefix_store_windows:
                continue
            if position <= last or position > len(request.prompt_ids):
                self._tier.save_windows(key, position, request.depth, windows.rings)
        request.windows = {}

    def _save_blocks(self, request: Request) -> None:
        if self._tier is None or not request.published:
            return
        blocks = request.block_ids[: request.published]
        # A block may have been computed twice at once; the pool knows the one that is findable.
        depths = [request.depth] * len(blocks)
        for number, key in enumerate(request.keys[: len(blocks)]):
            known = self._pool.lookup(key)
            if known is not None:
                depths[number] = min(depths[number], self._pool.depth_of(known))
        start = chain_start(self._root, request.cache_salt)
        self._tier.save(start, request.keys[: len(blocks)], blocks, depths)

    def publish(self, request: Request) -> None:
        """Make the blocks that a request has filled findable."""
        size = self._config.block_size
        full = request.length // size
        ids = request.token_ids
        while len(request.keys) < full:
            parent = (
                request.keys[-1] if request.keys else chain_start(self._root, request.cache_salt)
            )
            start = len(request.keys) * size
            request.keys.append(next_key(parent, ids[start : start + size]))
        for number in range(request.published, full):
            self._pool.publish(request.block_ids[number], request.keys[number], request.depth)
        request.published = max(request.published, full)

    def _why_not(self, request: Request) -> str | None:
        window = self._plan.sliding_window
        if request.params.prompt_logprobs is not None:
            return "prompt log-probabilities need every prompt token to run"
        if not request.matched_tokens:
            return "no block of this prompt is cached"
        if request.matched_tokens <= window:
            return (
                f"the match of {request.matched_tokens} tokens is not longer than the window of "
                f"{window}, which runs again anyway"
            )
        return None

    def _last_resume(self, request: Request) -> int:
        """Last position of the prompt from which stored windows let it go on."""
        config, plan = self._config, self._plan
        mode = config.resolve_decoder_prefill(plan)
        return last_resume(plan, mode, config.replay_windows, len(request.prompt_ids))  # type: ignore[arg-type]

    def _replayed(self, request: Request, encoder_replay: str) -> int:
        """Tokens before the end of the hit that run through the encoder again."""
        config, plan = self._config, self._plan
        suffix = len(request.prompt_ids) - request.cached_tokens
        mode = config.resolve_decoder_prefill(plan)
        rows = boundary_rows(plan, mode, config.replay_windows, suffix=suffix)  # type: ignore[arg-type]
        return encoder_replay_rows(
            plan, encoder_replay, windows=1,  # type: ignore[arg-type]
            decoder_rows=min(rows, len(request.prompt_ids)), suffix=suffix,
        )  # fmt: skip
