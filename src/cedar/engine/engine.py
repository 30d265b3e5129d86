"""`Engine`: requests in, tokens out, one step at a time. Synchronous, single thread, token ids only.

Called by `cedar.llm` and by the asynchronous engine of the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cedar.cache.block_pool import BlockPool
from cedar.config.engine_config import EngineConfig
from cedar.engine.account import Account
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.request import FinishReason, Request, RequestStatus
from cedar.engine.runner import Runner
from cedar.engine.sampler import Logprob
from cedar.engine.sampling_params import SamplingParams
from cedar.engine.scheduler import Scheduler
from cedar.errors import RequestError


@dataclass(frozen=True)
class StepOutput:
    """One new token of one request, or its end without one (abort).

    Attributes:
        request: as it stands after the token.   token_id: None only for an abort.
        logprobs: as asked for.
    """

    request: Request
    token_id: int | None
    logprobs: tuple[Logprob, ...] | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request has ended; None while it runs."""
        return self.request.finish_reason


class Engine:
    """Continuous batching over one model.

    Args:
        model: what to run.   config: limits and modes.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.model, self.config = model, config
        self.pool = BlockPool(config.pool_blocks)
        self.runner = Runner(model, config)
        self.scheduler = Scheduler(config, self.pool, model.config.vocab_size)
        self._requests: dict[str, Request] = {}

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
        eos_token_id: int | None = None, index: int = 0,
    ) -> Request:  # fmt: skip
        """Queue one completion.

        Raises:
            RequestError: the id is in use, or a field is out of range.
            DoesNotFitError: it could never run.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is already running", param="request_id")
        request = Request(request_id, tuple(prompt_ids), params, eos_token_id, index)
        self.scheduler.add(request)
        self._requests[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            self.runner.forget(request)

    def step(self) -> list[StepOutput]:
        """Run one step and return the new tokens, in scheduling order."""
        batch = self.scheduler.schedule()
        outputs = []
        for request, drawn in self.runner.execute(batch):
            request.append(drawn.token_id)
            outputs.append(StepOutput(request, drawn.token_id, drawn.logprobs))
        for chunk in batch.prefills:
            request = chunk.request
            if chunk.is_last and request.status is RequestStatus.PREFILL:
                request.status = RequestStatus.DECODE
        for request in self.scheduler.retire():
            self._requests.pop(request.request_id, None)
            self.runner.forget(request)
        return outputs
