"""`Service`: the model, its text side and its engine, as every endpoint sees them.

Admission happens here, before any byte of an answer is sent. Knows text and requests; routes and
JSON are in the modules of the endpoints.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cedar import __version__
from cedar.engine.async_engine import AsyncEngine
from cedar.engine.host import EngineHost
from cedar.engine.output_stream import OutputStream
from cedar.engine.request import Request
from cedar.engine.sampling_params import SamplingParams
from cedar.errors import ConfigError, DoesNotFitError, RequestError, UsageError
from cedar.server.completion import Completion, Piece
from cedar.server.config import ServerConfig
from cedar.server.errors import ApiError
from cedar.server.metrics import Metrics
from cedar.server.responses import Usage
from cedar.server.token_text import TokenText
from cedar.text.chat_template import ChatTemplate
from cedar.text.completion import CompletionText
from cedar.text.tokenizer import Tokenizer

#: Texts longer than this are encoded on a worker thread, so that the loop stays free.
_LONG_TEXT = 20_000
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Service:
    """One model being served.

    Args:
        host: runs the engine; not used by anybody else from now on.   config: names and limits.
        tokenizer: None = prompts are token ids.   eos_token_id: ends a text; None = nothing does.
        template: the model's chat format; None = `no_chat` says why there is none.
        defaults: sampling fields that a request may leave out, from `sampling_defaults`.

    Attributes:
        is_draining: shutting down, nothing new is accepted.
        active: calls that have not been answered in full.
    """

    def __init__(
        self, host: EngineHost, config: ServerConfig, *, tokenizer: Tokenizer | None = None,
        eos_token_id: int | None = None, template: ChatTemplate | None = None,
        no_chat: str = "this model has no chat format", defaults: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.template, self.no_chat = config, template, no_chat
        self.tokenizer, self.eos_token_id, self.defaults = tokenizer, eos_token_id, defaults or {}
        self.engine = AsyncEngine(
            host, max_waiting=config.max_waiting,
            on_step=lambda outputs: self.metrics.step(len(outputs)),
        )  # fmt: skip
        self.metrics = Metrics(self.engine, self.name)
        self.token_text = TokenText(tokenizer)
        self.started = int(time.time())
        self.fingerprint = f"cedar-{__version__}"
        self.is_draining = False
        self.active: set[Call] = set()

    @property
    def name(self) -> str:
        """The name that is shown."""
        return self.config.served_model_names[0]

    @property
    def max_model_len(self) -> int:
        """Tokens a request may hold, prompt and output together."""
        return self.engine.info.config.max_model_len

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be accepted."""
        has_room = self.engine.waiting_with(1) <= self.config.max_waiting
        return not self.is_draining and self.engine.is_running and has_room

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here; no name means the one there is.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in self.config.served_model_names:
            raise ApiError(
                f"the model {name[:200]!r} is not served here; served: "
                f"{', '.join(self.config.served_model_names)}",
                status=404, param="model",
            )  # fmt: skip

    async def encode(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text.

        Raises:
            RequestError: the model has no tokenizer.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError(
                "this model has no tokenizer; pass the prompt as token ids", param="prompt"
            )
        if len(prompt) < _LONG_TEXT:
            return tokenizer.encode(prompt, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, prompt, add_special_tokens)

    def room(self, prompt_ids: Sequence[int]) -> int:
        """Tokens that fit behind a prompt, at least 1 (the engine refuses what does not fit)."""
        return max(1, self.max_model_len - len(prompt_ids))

    def open(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, prefix: str, *,
        end_ids: Sequence[int] = (), cache_salt: str | None = None,
    ) -> Call:  # fmt: skip
        """Queue `params.n` completions of every prompt, all or none.

        Args:
            prefix: of the response's id.
            end_ids: further ids that end a text unless `ignore_eos` is set.
            cache_salt: separates tenants in the prefix cache.

        Raises:
            ApiError: shutting down, or it can never fit.   RequestError, QueueFullError: refused.
        """
        if self.is_draining:
            raise ApiError(
                "the server is shutting down; send the request elsewhere", status=503,
                headers={"Retry-After": str(self.config.retry_after_seconds)},
            )  # fmt: skip
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids", param="stop")
        call = Call(self, f"{prefix}-{secrets.token_hex(12)}", params.n)
        if end_ids and not params.ignore_eos:
            more = [i for i in end_ids if i not in params.stop_token_ids]
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *more))
        for number, prompt in enumerate(prompts):
            ids = tuple(prompt)  # one for all of its completions, so that it is sent once
            for index in range(params.n):
                name = f"{call.id}-{number * params.n + index}"
                request = Request(name, ids, params, self.eos_token_id, index)
                request.cache_salt = (cache_salt or "").encode("utf-8")
                call.requests.append(request)
        try:
            call.stream = self.engine.open(call.requests)
        except DoesNotFitError as error:
            raise self._too_big(error, max(call.requests, key=_total)) from None
        self.active.add(call)
        return call

    def new_text(self, stop: Sequence[str], *, skip_special_tokens: bool) -> CompletionText | None:
        """The text side of one completion."""
        if self.tokenizer is None:
            return None
        return CompletionText(self.tokenizer, stop, skip_special_tokens)

    def _too_big(self, error: DoesNotFitError, request: Request) -> ApiError:
        info = self.engine.info
        size, num_blocks = info.config.block_size, info.limits.num_blocks
        limit = min(info.config.max_model_len, num_blocks * size)
        required = -(-_total(request) // size) * info.block_bytes
        available = min(info.config.blocks_per_sequence, num_blocks) * info.block_bytes
        return ApiError(
            f"{error}; its KV cache needs {required} bytes, one request may use {available}",
            status=400, param="max_tokens" if len(request.prompt_ids) < limit else "prompt",
            extra={"required_bytes": required, "available_bytes": available},
        )  # fmt: skip


class Call:
    """One HTTP call: its completions in the engine and their choices.

    Attributes:
        id, created: of the response.   n: completions per prompt.
        requests: by number of the choice.   choices: in the same order; the endpoint adds them.
    """

    stream: OutputStream

    def __init__(self, service: Service, name: str, n: int) -> None:
        self._service = service
        self.id, self.created, self.n = name, int(time.time()), n
        self.requests: list[Request] = []
        self.choices: list[Completion] = []
        self._by_id: dict[str, Completion] = {}

    def add(self, choice: Completion) -> None:
        """Add the next choice; they come in the order of `requests`."""
        self.choices.append(choice)
        self._by_id[choice.request.request_id] = choice

    async def next(self, timeout: float | None = None) -> list[tuple[int, Piece]]:
        """Number of the choice and what it says next; empty when `timeout` seconds have passed."""
        pieces = []
        for output in await self.stream.next(timeout):
            name = output.request.request_id
            choice = self._by_id[name]
            if choice.finish_reason is not None:
                continue  # a stop string ended it while this token was on its way
            piece = choice.take(output)
            if piece.finish_reason is not None:
                self.stream.end(name)
            pieces.append((choice.index, piece))
        return pieces

    def close(self) -> None:
        """End what still runs, once; the call no longer counts as active."""
        self.stream.close()
        for choice in self.choices:
            choice.end("abort")
        self._service.active.discard(self)

    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once, whatever `n`."""
        prompts = self.requests[:: self.n]
        prompt = sum(len(request.prompt_ids) for request in prompts)
        output = sum(choice.num_tokens for choice in self.choices)
        cached = sum(request.cached_tokens for request in prompts)
        return Usage(prompt, output, prompt + output, {"cached_tokens": cached})

    def reading(self) -> dict[str, Any]:
        """The response's `cedar` field: how the first prompt was read, and why.

        `decoder_prefill` is what ran for this call; with `prompt_logprobs` every row needs the
        decoder, so it is `full` then, whatever the server's mode.
        """
        request = self.requests[0]
        document: dict[str, Any] = {
            "decoder_prefill": self._service.engine.info.decoder_prefill,
            "prefix_cache": {
                "matched_tokens": request.matched_tokens,
                "cached_tokens": request.cached_tokens,
                "disk_tokens": request.cached_from_disk,
                "replayed_tokens": request.replayed_tokens,
                "miss_reason": request.miss_reason,
            },
        }
        if request.wants_prompt_logprobs and document["decoder_prefill"] != "full":
            document["decoder_prefill"] = "full"
            document["decoder_prefill_reason"] = (
                "prompt log-probabilities need the decoder on every prompt row"
            )
        return document


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Sampling fields that a model directory's `generation_config.json` sets.

    Raises:
        ConfigError: the file is no JSON object, or a value is out of range.
    """
    file = directory / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{file} holds a {type(document).__name__}, expected an object")
    if document.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {name: document[name] for name in _DEFAULTS if document.get(name) is not None}
    try:
        SamplingParams(**found)
    except UsageError as error:
        raise ConfigError(f"{file}: {error}") from None
    return found


def _total(request: Request) -> int:
    return len(request.prompt_ids) + request.params.max_tokens
