"""`cedar serve` as users run it: a process, a socket, the official client, curl and signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import openai
import pytest
from server_process import running


def test_the_official_client_curl_and_a_graceful_end(tiny_directory: Path) -> None:
    with running(tiny_directory, "--served-model-name", "tiny") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "the cat"}], max_tokens=5,
            temperature=0, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert chat.usage is not None and chat.usage.completion_tokens <= 5
        chunks = list(client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "the cat"}], max_tokens=5,
            temperature=0, stream=True, stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ))  # fmt: skip
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert streamed == chat.choices[0].message.content
        assert chunks[-1].choices == [] and chunks[-1].usage == chat.usage
        echo = client.completions.create(
            model="tiny", prompt=[20, 21, 22], max_tokens=1, echo=True, logprobs=1, temperature=0
        )
        assert echo.choices[0].logprobs is not None
        values = echo.choices[0].logprobs.token_logprobs
        assert values is not None and values[0] is None and len(values) == 4
        with pytest.raises(openai.BadRequestError, match="max_model_len"):
            client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
        with pytest.raises(openai.NotFoundError, match="not served"):
            client.completions.create(model="gpt-4", prompt="x")
        with pytest.raises(openai.AuthenticationError, match="API key"):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
        _curl_streams(url)
        _ends_gracefully(process, client, url)


def test_a_server_whose_engine_process_is_killed_ends_its_streams_and_exits_with_1(
    tiny_directory: Path,
) -> None:
    with running(tiny_directory, "--served-model-name", "tiny") as (process, url):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt="the", max_tokens=4000, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        os.kill(int(children[0]), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine has died"):
            list(stream)
        assert process.wait(timeout=60) == 1
        assert process.stderr is not None
        assert "error: the engine has died: its process ended with" in process.stderr.read()


def _curl_streams(url: str) -> None:
    curl = shutil.which("curl")
    assert curl is not None
    body = '{"prompt": "the", "max_tokens": 3, "stream": true}'
    done = subprocess.run(
        [curl, "-sSN", f"{url}/v1/completions", "-H", "Authorization: Bearer sesame", "-d", body],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("data: {") and done.stdout.endswith("data: [DONE]\n\n")


def _ends_gracefully(process: subprocess.Popen[str], client: openai.OpenAI, url: str) -> None:
    """SIGTERM in the middle of a stream: it is finished, new work is refused, exit 0."""
    stream = client.completions.create(
        model="tiny", prompt="the", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    with pytest.raises(openai.APIError):
        client.completions.create(model="tiny", prompt="x")
    last = [choice for chunk in stream for choice in chunk.choices][-1]
    assert last.finish_reason == "length"
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None and process.stderr.read() == ""
