"""`Engine`: requests in, tokens out, one step at a time. Synchronous, single thread, token ids only.

Called by `cedar.llm` and, in a server, by `engine_loop.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cedar.cache.block_pool import BlockPool
from cedar.cache.hashing import KEY_BYTES
from cedar.cache.store import PrefixStore
from cedar.cache.window_cache import WindowCache
from cedar.config.engine_config import EngineConfig
from cedar.engine.account import Account
from cedar.engine.disk_tier import DiskTier
from cedar.engine.engine_status import EngineCounts, EngineDetails, EngineInfo, RequestRow
from cedar.engine.limits import RequestLimits
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.output import StepOutput
from cedar.engine.phases import EncoderReplay, check_choice
from cedar.engine.prefix_reuse import PrefixReuse
from cedar.engine.request import Request, RequestStatus
from cedar.engine.runner import Runner
from cedar.engine.sampling_params import SamplingParams
from cedar.engine.scheduler import Scheduler
from cedar.errors import RequestError, UsageError

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one model.

    Args:
        model: what to run.   config: limits and modes.
        prefix_root: `Fingerprint.root()` of the model; only blocks under it are ever found. The
            default serves an engine that shares its blocks with nobody.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig, prefix_root: bytes = bytes(KEY_BYTES)
    ) -> None:
        self.model, self.config = model, config
        config.check_positions(model.config.max_position_embeddings)
        check_choice("encoder_replay", config.encoder_replay, EncoderReplay)
        self.runner = Runner(model, config)  # first: refuses what memory cannot hold
        self.pool = BlockPool(config.pool_blocks)
        # Two for each request that runs: of its prompt and of its answer.
        self.windows = WindowCache(2 * config.max_num_seqs)
        self._tier = self._open_tier(prefix_root)
        reuse = None
        if config.caches_prefixes:
            reuse = PrefixReuse(
                model.plan, config, self.pool, self.windows, prefix_root, self._tier
            )
        self.limits = RequestLimits(
            config, self.pool.num_blocks, vocab_size=model.config.vocab_size,
            positions=model.config.max_position_embeddings,
        )  # fmt: skip
        self.scheduler = Scheduler(self.limits, self.pool, reuse)
        self._requests: dict[str, Request] = {}
        self._submitted = 0
        self._is_closed = False

    def _open_tier(self, root: bytes) -> DiskTier | None:
        config, rows = self.config, self.runner.state.pool
        if config.prefix_store_dir is None:
            return None
        store = PrefixStore(
            config.prefix_store_dir, root=root, limit_bytes=config.prefix_store_size,
            record_bytes=rows.block_bytes,
        )  # fmt: skip
        stats = store.stats()
        logger.info(
            "prefix store opened directory=%s records=%d bytes=%d limit_bytes=%d",
            stats.directory, stats.records, stats.bytes_on_disk, store.limit_bytes,
        )  # fmt: skip
        return DiskTier(rows, store)

    @property
    def tier(self) -> DiskTier | None:
        """The prefix store on disk, if one is configured."""
        return self._tier

    def close(self) -> None:
        """Finish writing to the prefix store, close it and end what runs; nothing runs from then on."""
        self._is_closed = True
        if self._tier is not None:
            self._tier.close()
            self._tier = None
        for request_id in list(self._requests):
            self.abort(request_id)

    @property
    def info(self) -> EngineInfo:
        """What never changes."""
        return EngineInfo(
            self.limits, self.runner.state.pool.block_bytes, self.runner.decoder_prefill,
            self._tier is not None,
        )  # fmt: skip

    def counts(self) -> EngineCounts:
        """Counts right now; any thread may call it."""
        scheduler, pool = self.scheduler, self.pool
        return EngineCounts(
            len(scheduler.running), len(scheduler.waiting), pool.num_blocks, pool.num_free,
            scheduler.preemptions, self._submitted,
        )  # fmt: skip

    def details(self) -> EngineDetails:
        """What metrics and the live view show; any thread may call it."""
        account, scheduler, tier = self.account, self.scheduler, self._tier
        return EngineDetails(
            account.encode.tokens, account.replay.tokens, account.decode.tokens, self.pool.stats(),
            self.windows.nbytes, None if tier is None else tier.stats(),
            tuple(_row(request) for request in (*scheduler.running, *scheduler.waiting)),
        )  # fmt: skip

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everything that runs or waits."""
        return tuple(self._requests.values())

    @property
    def account(self) -> Account:
        """Work of all phases so far."""
        return self.runner.account

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work

    def add_request(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *,
        eos_token_id: int | None = None, index: int = 0, cache_salt: bytes = b"",
    ) -> Request:  # fmt: skip
        """Queue one completion.

        Raises:
            RequestError: the id is in use, or a field is out of range.
            DoesNotFitError: it could never run.   UsageError: the engine is closed.
        """
        request = Request(request_id, tuple(prompt_ids), params, eos_token_id, index)
        request.cache_salt = cache_salt
        self.submit(request)
        return request

    def submit(self, request: Request) -> None:
        """Queue a request that has been made already. Raises as `add_request`."""
        self._submitted += 1
        self._check_open()
        if request.request_id in self._requests:
            raise RequestError(
                f"request id {request.request_id!r} is already running", param="request_id"
            )
        self.scheduler.add(request)
        self._requests[request.request_id] = request

    def find(self, request_id: str) -> Request | None:
        """A waiting or running request."""
        return self._requests.get(request_id)

    def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            self.runner.forget(request)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the engine is closed; make a new LLM, or close it after its last use")

    def step(self) -> list[StepOutput]:
        """Run one step and return the new tokens, in scheduling order.

        Raises:
            UsageError: the engine is closed.
        """
        self._check_open()
        batch = self.scheduler.schedule()
        outputs = []
        drawn_tokens = self.runner.execute(batch)
        self.scheduler.commit(batch)
        for request, drawn in drawn_tokens:
            request.append(drawn.token_id)
            outputs.append(
                StepOutput(request, drawn.token_id, drawn.logprobs, request.finish_reason)
            )
        for chunk in batch.prefills:
            request = chunk.request
            if chunk.is_last and request.status is RequestStatus.PREFILL:
                request.status = RequestStatus.DECODE
        for request in self.scheduler.retire():
            self._requests.pop(request.request_id, None)
            self.runner.forget(request)
        return outputs


def _row(request: Request) -> RequestRow:
    return RequestRow(
        request.request_id, request.status.value, len(request.prompt_ids), request.read,
        request.cached_tokens, request.cached_from_disk, len(request.output_ids),
        request.params.max_tokens, request.preemptions, request.arrival,
    )  # fmt: skip
