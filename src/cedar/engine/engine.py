"""`Engine`: requests in, tokens out, one step at a time. Synchronous, single thread, token ids only.

Called by `cedar.llm` and by the asynchronous engine of the server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cedar.cache.block_pool import BlockPool
from cedar.cache.hashing import KEY_BYTES
from cedar.cache.store import PrefixStore
from cedar.cache.window_cache import WindowCache
from cedar.config.engine_config import EngineConfig
from cedar.engine.account import Account
from cedar.engine.disk_tier import DiskTier
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.phases import EncoderReplay, check_choice
from cedar.engine.prefix_reuse import PrefixReuse
from cedar.engine.request import FinishReason, Request, RequestStatus
from cedar.engine.runner import Runner
from cedar.engine.sampler import Logprob
from cedar.engine.sampling_params import SamplingParams
from cedar.engine.scheduler import Scheduler
from cedar.errors import RequestError, UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutput:
    """One new token of one request, or its end without one (abort).

    Attributes:
        request: live; whoever reads an output later sees the request as it is then.
        token_id: None only for an abort.
        logprobs: as asked for.
        finish_reason: why the request ended with this token; None when it went on.
    """

    request: Request
    token_id: int | None
    logprobs: tuple[Logprob, ...] | None = None
    finish_reason: FinishReason | None = None


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
        self.scheduler = Scheduler(config, self.pool, model.config.vocab_size, reuse)
        self._requests: dict[str, Request] = {}
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
