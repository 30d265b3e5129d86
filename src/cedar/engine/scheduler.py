"""Who runs in the next step: admission, chunked prefill, decode, preemption. No tensors, no text.

Every step feeds one token of each decoding request, then spends what is left of
`max_num_batched_tokens` on prompts, oldest first. A request is admitted when a slot and all blocks
of its tokens are free. When a decoding request needs a block and none is free, the youngest running
request loses its blocks and waits again; when it comes back its prompt is read again and its tokens
are fed again one by one, so the result is the one it would have had.
"""

from __future__ import annotations

from collections import deque

from cedar.cache.block_pool import BlockPool
from cedar.engine.batch import Batch, PrefillChunk
from cedar.engine.limits import RequestLimits
from cedar.engine.prefix_reuse import PrefixReuse
from cedar.engine.request import FinishReason, Request, RequestStatus


class Scheduler:
    """Queues of one engine.

    Args:
        limits: what is refused, and the sizes of a step.   pool: block accounting.
        reuse: prefix cache policy; None = off.
    """

    def __init__(self, limits: RequestLimits, pool: BlockPool, reuse: PrefixReuse | None) -> None:
        self._limits, self._config = limits, limits.config
        self._pool, self._reuse = pool, reuse
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._free_slots = list(reversed(range(limits.config.max_num_seqs)))

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request that the limits allow. Raises as `RequestLimits.check`."""
        self._limits.check(request)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request at once and give its blocks back; nothing to do if it has ended."""
        if request.status is RequestStatus.FINISHED:
            return
        if request in self.running:
            self._release(request)
        else:
            self.waiting.remove(request)
        request.finish(FinishReason.ABORT)

    def schedule(self) -> Batch:
        """Choose the work of the next step; blocks for it are allocated."""
        preempted: list[Request] = []
        decodes = []
        for request in list(self.running):
            if request.status is RequestStatus.DECODE and self._make_room(request, preempted):
                decodes.append(request)
        decodes = [request for request in decodes if request not in preempted]
        budget = self._config.max_num_batched_tokens - len(decodes)
        prefills: list[PrefillChunk] = []
        for request in self.running:
            if request.status is RequestStatus.PREFILL and budget > 0:
                budget -= self._add_chunk(request, budget, prefills)
        while self.waiting and budget > 0 and not preempted and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            budget -= self._add_chunk(request, budget, prefills)
        return Batch(tuple(prefills), tuple(decodes), tuple(preempted))

    def commit(self, batch: Batch) -> None:
        """The batch has run: blocks it filled become findable."""
        if self._reuse is None:
            return
        for request in (*(chunk.request for chunk in batch.prefills), *batch.decodes):
            self._reuse.publish(request)
        for chunk in batch.prefills:
            if chunk.is_last:
                self._reuse.save(chunk.request)

    def retire(self) -> list[Request]:
        """Take finished requests off the running list and free what they held."""
        finished = [r for r in self.running if r.status is RequestStatus.FINISHED]
        for request in finished:
            if self._reuse is not None:
                self._reuse.save(request)
            self._release(request)
        return finished

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size)

    def _add_chunk(self, request: Request, budget: int, prefills: list[PrefillChunk]) -> int:
        count = min(budget, len(request.prompt_ids) - request.read)
        ahead = [stop - request.read for stop in request.window_stops if stop > request.read]
        count = min([count, *ahead[:1]])
        prefills.append(PrefillChunk(request, request.read, count))
        return count

    def _admit(self, request: Request) -> bool:
        if not self._free_slots:
            return False
        adopted = [] if self._reuse is None else self._reuse.adopt(request)
        blocks = self._pool.allocate(self._blocks(len(request.token_ids)) - len(adopted))
        if blocks is None:
            self._pool.release(adopted)
            request.rewind()
            return False
        request.block_ids, request.slot = adopted + blocks, self._free_slots.pop()
        request.published = len(adopted)
        request.status = RequestStatus.PREFILL
        self.running.append(request)
        return True

    def _make_room(self, request: Request, preempted: list[Request]) -> bool:
        """Ensure a block for the next token, preempting the youngest; False if that was itself."""
        while request not in preempted and self._blocks(request.length + 1) > len(
            request.block_ids
        ):
            block = self._pool.allocate(1)
            if block is not None:
                request.block_ids += block
                continue
            victim = self.running[-1]
            self._release(victim)
            victim.rewind()
            victim.preemptions += 1
            self.preemptions += 1
            self.waiting.appendleft(victim)
            preempted.append(victim)
        return request not in preempted

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self._pool.release(request.block_ids)
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.block_ids, request.slot, request.windows = [], None, {}
