"""Sockets, start and shutdown of a server, in a thread of this process."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from server_api import ENGINE

from cedar.cli.serve import serve as serve_command
from cedar.errors import CheckpointError, UsageError
from cedar.server import launch
from cedar.server.config import ServerConfig
from cedar.server.engine_wire import EngineSpec
from cedar.server.launch import CedarServer, bind, build_service, url_of

BODY = {"prompt": "the", "max_tokens": 2000, "stream": True, "ignore_eos": True}


@pytest.fixture
def started(tiny_directory: Path) -> Iterator[Callable[[float], tuple[CedarServer, str]]]:
    """`started(grace_seconds)`: a listening server and its URL."""
    threads, servers = [], []

    def start(grace: float) -> tuple[CedarServer, str]:
        config = ServerConfig(served_model_names=("tiny",), port=0, grace_seconds=grace)
        service = build_service(
            EngineSpec(str(tiny_directory), {**ENGINE, "max_model_len": 4096}), config
        )
        bound, ready = bind(config), threading.Event()
        server = CedarServer(service, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        threads.append(thread)
        servers.append(server)
        assert ready.wait(60)
        return server, url_of(bound)

    yield start
    for server, thread in zip(servers, threads, strict=True):
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def test_a_grace_period_that_runs_out_ends_streams_as_aborted_and_the_server_with_them(
    started: Callable[[float], tuple[CedarServer, str]],
) -> None:
    server, url = started(0.3)
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.handle_exit(signal.SIGTERM, None)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"abort"' in rest[-2]


def test_a_second_signal_exits_at_once(
    started: Callable[[float], tuple[CedarServer, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = started(60.0)
    codes: list[int] = []
    monkeypatch.setattr(launch.os, "_exit", codes.append)
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: a client that drops it has left
        next(lines)
        server.handle_exit(signal.SIGINT, None)
        assert codes == []
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 503
        server.handle_exit(signal.SIGINT, None)
        assert codes == [130]


def test_a_taken_port_is_refused_before_a_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = ServerConfig(served_model_names=("x",), port=port)
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind(config)


def test_a_missing_model_and_bad_options_are_named(tmp_path: Path) -> None:
    runner = CliRunner()
    missing = runner.invoke(serve_command, [str(tmp_path / "none"), "--port", "0"])
    assert isinstance(missing.exception, CheckpointError)
    template = ["preset:tiny", "--port", "0", "--chat-template", "mine.jinja"]
    chat = runner.invoke(serve_command, template)
    assert isinstance(chat.exception, UsageError) and "mine.jinja has no eff" in str(chat.exception)
    port = runner.invoke(serve_command, ["preset:tiny", "--port", "70000"])
    assert isinstance(port.exception, UsageError) and "70000" in str(port.exception)


def test_a_preset_without_tokenizer_serves_token_ids_and_refuses_text() -> None:
    from server_api import Api, on_a_thread

    config = ServerConfig(served_model_names=("tiny",))
    service = build_service(
        EngineSpec("preset:tiny", {**ENGINE}, dtype="float32"), config, start_host=on_a_thread
    )
    service.engine.start()
    api = Api(service)
    try:
        body = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "return_token_ids": True,
                "logprobs": 1}  # fmt: skip
        choice = api.post("/v1/completions", body).json()["choices"][0]
        assert len(choice["token_ids"]) == 3 and choice["text"] == ""
        assert choice["logprobs"]["tokens"][0].startswith("token_id:")
        for path, refused in (
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
        ):
            answer = api.post(path, refused)
            assert answer.status_code == 400 and "tokenizer" in answer.json()["error"]["message"]
    finally:
        service.engine.stop()


def test_a_length_beyond_the_models_positions_is_refused_at_the_start(tiny_directory: Path) -> None:
    config = ServerConfig(served_model_names=("tiny",))
    with pytest.raises(UsageError, match="max_model_len=4097 exceeds the model's max_position_emb"):
        build_service(EngineSpec(str(tiny_directory), {**ENGINE, "max_model_len": 4097}), config)
