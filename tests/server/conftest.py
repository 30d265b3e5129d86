"""A tiny model directory with a vocabulary, served in this process without a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_api import ENGINE, Api, on_a_thread
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cedar.config.presets import preset
from cedar.engine.random_weights import random_tensors
from cedar.formats.checkpoint import write_checkpoint
from cedar.server.config import ServerConfig
from cedar.server.engine_wire import EngineSpec
from cedar.server.launch import build_service
from cedar.text.deepseek_markers import REQUIRED_MARKERS
from cedar.training.tokenizer_training import train_tokenizer

VOCAB_SIZE = 320
SENTENCES = [
    "the cat sat on the mat and the dog ran after the cat in the rain \U0001f600 中文",
    "every model reads a prompt once; what was read should come back after a restart",
    "small words make small tokens, and small tokens make long answers for little tests",
] * 4


def _write_model(directory: Path, markers: tuple[str, ...]) -> Path:
    config = replace(preset("tiny"), vocab_size=VOCAB_SIZE)
    write_checkpoint(directory, random_tensors(config, 0), config.to_dict())
    file = directory / "tokenizer.json"
    train_tokenizer(SENTENCES, VOCAB_SIZE - len(markers), file)
    if markers:
        backend = Backend.from_file(str(file))
        backend.add_special_tokens([AddedToken(text, special=True) for text in markers])
        backend.save(str(file))
    return directory


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that chats in the small format."""
    return _write_model(tmp_path_factory.mktemp("tiny"), ())


@pytest.fixture(scope="session")
def dsml_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that chats in the DeepSeek-V4.1 format, with reasoning and tool calls."""
    markers = tuple(text for text in REQUIRED_MARKERS if text not in ("<think>", "</think>"))
    return _write_model(tmp_path_factory.mktemp("dsml"), markers)


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., Api]]:
    """`serve(directory, engine fields, load arguments, **ServerConfig fields)`: a running service."""
    services = []

    def start(
        directory: Path, engine: dict[str, Any] | None = None, load: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Api:  # fmt: skip
        config = ServerConfig(served_model_names=("tiny", "alias"), **fields)
        fields, options = {**ENGINE, **(engine or {})}, {"dtype": "float32", **(load or {})}
        spec = EngineSpec(str(directory), fields, **options)
        service = build_service(spec, config, start_host=on_a_thread)
        service.engine.start()
        services.append(service)
        return Api(service)

    yield start
    for service in services:
        service.engine.stop()


@pytest.fixture(scope="session")
def api(serve: Callable[..., Api], tiny_directory: Path) -> Api:
    """The tiny model."""
    return serve(tiny_directory)


@pytest.fixture(scope="session")
def dsml_api(serve: Callable[..., Api], dsml_directory: Path) -> Api:
    """The model with reasoning and tool calls."""
    return serve(dsml_directory, {"max_model_len": 1024, "max_num_batched_tokens": 1024})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], None]:
    """`scripted(ids)`: whatever is asked, the model draws these ids in turn."""

    def install(ids: list[int]) -> None:
        from cedar.engine.sampler import Sampled, top_logprobs

        def sample(logits: Any, params: Any, *, output: list[int], **_: Any) -> Sampled:
            token = ids[len(output)]
            count = params.logprobs
            return Sampled(token, None if count is None else top_logprobs(logits, token, count))

        monkeypatch.setattr("cedar.engine.runner.sample", sample)

    return install
