"""Model name -> service -> running server: sockets, signals and the shutdown. Called by the CLI.

First SIGTERM or SIGINT: new requests get 503, running ones may finish within the grace period, the
engine stops, exit 0. Second signal: the process ends at once with 130. When the engine dies, its
streams get an error and the server ends, with exit 1.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn

from cedar.config.model_config import ModelConfig
from cedar.config.presets import preset
from cedar.engine.host import EngineHost
from cedar.errors import UsageError
from cedar.model_directory import PRESET_PREFIX, end_token, find_tokenizer, resolve_model
from cedar.server.app import create_app
from cedar.server.config import ServerConfig
from cedar.server.engine_wire import EngineSpec
from cedar.server.process_host import ProcessHost
from cedar.server.service import Service, sampling_defaults
from cedar.text.chat_template import load_chat_template

#: Context of a server that is not told one: the model's own, up to this many tokens.
DEFAULT_MODEL_LEN = 8192
#: Seconds for the last chunks to leave after the engine has stopped.
_FLUSH_SECONDS = 5
_POLL_SECONDS = 0.05
INTERRUPTED = 130
_NO_TEXT = "this model has no tokenizer; pass token ids"


def build_service(
    spec: EngineSpec, config: ServerConfig, *, chat_template: Path | None = None,
    start_host: Callable[[EngineSpec], EngineHost] = ProcessHost,
) -> Service:  # fmt: skip
    """Load a model and everything around it.

    Args:
        spec: a directory, `nano` or `preset:NAME`, and how to run it; a `max_model_len` of None is the
            model's own, up to `DEFAULT_MODEL_LEN`. Token ids only where it has no tokenizer.
        config: names and limits.
        chat_template: a Jinja file to use instead of the model's own format.
        start_host: where the engine runs.

    Raises:
        CheckpointError, UsageError: as `cedar.load`.
        StoreError: the prefix store cannot be opened, or another process writes it.
    """
    template, no_chat, defaults = None, _NO_TEXT, {}
    if spec.model.startswith(PRESET_PREFIX):
        model_config = preset(spec.model.removeprefix(PRESET_PREFIX))
    else:
        directory = resolve_model(spec.model)
        model_config = ModelConfig.from_pretrained(directory)
        try:
            template = load_chat_template(directory, template_file=chat_template)
        except UsageError as error:
            if chat_template is not None:
                raise
            no_chat = str(error)
        defaults = sampling_defaults(directory)
    tokenizer = find_tokenizer(spec.model)
    if tokenizer is None:
        if chat_template is not None:
            raise UsageError(
                f"--chat-template {chat_template} has no effect: {spec.model} has no tokenizer; leave "
                "it out, or serve a model directory with a tokenizer.json"
            )
        template, no_chat = None, _NO_TEXT
    if spec.engine.get("max_model_len") is None:
        limit = min(model_config.max_position_embeddings, DEFAULT_MODEL_LEN)
        spec = replace(spec, engine={**spec.engine, "max_model_len": limit})
    return Service(
        start_host(spec), config, tokenizer=tokenizer, template=template, no_chat=no_chat,
        eos_token_id=end_token(tokenizer, model_config), defaults=defaults,
    )  # fmt: skip


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is found before the model loads.

    Raises:
        UsageError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {config.host!r} cannot be used: {error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --port"
        ) from None
    return bound


def url_of(bound: socket.socket) -> str:
    """The address a client uses."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class CedarServer(uvicorn.Server):
    """uvicorn with cedar's shutdown.

    Args:
        service: what is served.
        announce: called once, when requests are accepted.
    """

    def __init__(self, service: Service, announce: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service), loop="uvloop", http="httptools", log_config=None,
                access_log=False, timeout_graceful_shutdown=_FLUSH_SECONDS, lifespan="on",
            )
        )  # fmt: skip
        self._service, self._announce = service, announce
        self._draining: asyncio.Task[None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._announce()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: end when the engine has died, since nothing can be served any more."""
        if self._service.engine.failure is not None and self._draining is None:
            self.drain()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain and exit 0. Second: end now."""
        if self._service.is_draining or self.loop is None:
            os._exit(INTERRUPTED)
        self._service.is_draining = True
        self.loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Begin the shutdown; runs on the loop."""
        self._service.is_draining = True
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        service, loop = self._service, asyncio.get_running_loop()
        deadline = loop.time() + service.config.grace_seconds
        while service.active and service.engine.failure is None and loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.to_thread(service.engine.stop)
        deadline = loop.time() + _FLUSH_SECONDS
        while service.active and loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        self.should_exit = True
