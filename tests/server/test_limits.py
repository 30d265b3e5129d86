"""Refusals come with the right status before any byte of an answer; keys, queue, probes, metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_api import Api

from cedar.engine.batch import Batch
from cedar.engine.sampling_params import SamplingParams
from cedar.errors import EngineDeadError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def small(serve: Callable[..., Api], tiny_directory: Path) -> Api:
    """One request runs, two may wait, silence lasts 50 ms."""
    return serve(tiny_directory, {"max_num_seqs": 1}, max_waiting=2, keep_alive_seconds=0.05,
                 retry_after_seconds=7, grace_seconds=0.0)  # fmt: skip


@contextmanager
def held(api: Api) -> Iterator[None]:
    """The model stands still inside: its next batch waits for the end of the block."""
    runner = api.engine.runner
    release, original = threading.Event(), runner.execute

    def execute(batch: Batch) -> Any:
        release.wait(30)
        return original(batch)

    runner.execute = execute  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner.execute = original  # type: ignore[method-assign]
        release.set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})],
)
def test_a_request_that_can_never_fit_is_refused_with_bytes_before_the_stream_opens(
    api: Api, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = api.post(path, {**body, "max_tokens": 5000, "stream": stream})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["required_bytes"] > error["available_bytes"] > 0
    assert str(error["required_bytes"]) in error["message"]


def test_a_full_queue_answers_429_and_says_when_to_come_back(small: Api) -> None:
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}

    async def run() -> tuple[list[int], Any]:
        async with small.client() as client:
            with held(small):
                first = [asyncio.create_task(client.post(COMPLETIONS, json=body))]
                await asyncio.sleep(0.1)  # it is taken into the batch
                first += [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in "ab"]
                await asyncio.sleep(0.1)
                ready = await client.get("/ready")
                refused = await client.post(COMPLETIONS, json={**body, "stream": True})
                both = await client.post(COMPLETIONS, json={**body, "n": 2})
                assert ready.status_code == 503
                assert both.status_code == 429
            return [answer.status_code for answer in await asyncio.gather(*first)], refused

    accepted, refused = asyncio.run(run())
    assert accepted == [200, 200, 200]
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "7"
    assert refused.json()["error"]["type"] == "RateLimitError"
    impossible = small.post(COMPLETIONS, {**body, "n": 3})
    assert impossible.status_code == 400 and impossible.json()["error"]["param"] == "n"


def test_completions_of_one_prompt_share_its_ids(small: Api) -> None:
    async def run() -> None:
        call = small.service.open([[20, 21, 22]], SamplingParams(n=2, max_tokens=1), "x")
        first, second = (request.prompt_ids for request in call.requests)
        call.close()
        assert first is second

    asyncio.run(run())


def test_a_silent_stream_is_kept_alive_by_comments(small: Api) -> None:
    async def run() -> str:
        async with small.client() as client:
            with held(small):
                body = {"prompt": "x", "max_tokens": 1, "stream": True, "ignore_eos": True}
                task = asyncio.create_task(client.post(COMPLETIONS, json=body))
                await asyncio.sleep(0.3)
            return (await task).text

    text = asyncio.run(run())
    assert text.startswith(": keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")


def test_keys_are_needed_everywhere_but_at_the_probes(
    serve: Callable[..., Api], tiny_directory: Path
) -> None:
    api = serve(tiny_directory, api_keys=("sesame", "other"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}):
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            answer = api.post(path, {"prompt": "x"}, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "AuthenticationError"
        assert api.get("/v1/models", headers=headers).status_code == 401
        assert api.get("/v1/requests", headers=headers).status_code == 401
    for key in ("sesame", "other"):
        assert api.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for path in ("/health", "/ready", "/version", "/metrics", "/"):
        assert api.get(path).status_code == 200


def test_models_are_found_by_their_served_names_only(api: Api) -> None:
    entries = api.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in entries] == ["tiny", "alias"]
    assert entries[0]["max_model_len"] == 96
    assert api.get("/v1/models/alias").json()["id"] == "alias"
    assert api.get("/v1/models/gpt-4").status_code == 404
    answer = api.post(COMPLETIONS, {"model": "gpt-4", "prompt": "x"})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "NotFoundError"
    assert api.post(COMPLETIONS, {"model": "alias", "prompt": "x"}).status_code == 200


def test_a_wrong_path_or_method_is_told_what_there_is(api: Api) -> None:
    missing = api.post("/chat/completions", {}).json()["error"]
    assert "'/chat/completions'" in missing["message"] and CHAT in missing["message"]
    wrong = api.get(CHAT)
    assert wrong.json()["error"]["message"] == f"GET is not served at '{CHAT}'; allowed: POST"
    assert wrong.headers["allow"] == "POST"


def test_unknown_paths_methods_and_broken_bodies_get_error_objects(api: Api) -> None:
    for method, path, content, status in (
        ("GET", "/v2/nothing", None, 404),
        ("GET", COMPLETIONS, None, 405),
        ("POST", COMPLETIONS, b"{", 400),
        ("POST", COMPLETIONS, b"\xff\xfe", 400),
        ("POST", COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
        ("POST", COMPLETIONS, b"[" * 100_000, 400),
        ("POST", COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400),
        ("POST", COMPLETIONS, b'{"prompt": "x", "seed": 1e400}', 400),
        ("POST", COMPLETIONS, b'{"prompt": [' + b"9" * 5000 + b"]}", 400),
    ):
        answer = api.call(method, path, content=content, headers={"X-Request-Id": "mine"})
        assert answer.status_code == status, (path, content, answer.text)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["code"] == status
        assert answer.headers["x-request-id"] == "mine"


def test_a_body_above_the_limit_is_refused_with_and_without_a_length(
    serve: Callable[..., Api], tiny_directory: Path
) -> None:
    api = serve(tiny_directory, max_body_bytes=1000)

    async def pieces() -> Any:
        for _ in range(30):
            yield b" " * 100

    for content in (b" " * 3000, pieces()):
        answer = api.call("POST", COMPLETIONS, content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "RequestTooLargeError"


def test_while_draining_new_work_gets_503_and_probes_say_so(small: Api) -> None:
    small.service.is_draining = True
    answer = small.post(COMPLETIONS, {"prompt": "x"})
    assert answer.status_code == 503 and "retry-after" in answer.headers
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    assert small.get("/ready").json() == {"status": "draining"}
    assert small.get("/health").status_code == 200


def test_a_dead_engine_ends_streams_with_an_error_event_and_shows_in_the_probes(
    small: Api, caplog: pytest.LogCaptureFixture
) -> None:
    original, steps = small.engine.step, []

    def step() -> Any:
        steps.append(time.monotonic())
        if len(steps) > 3:
            raise RuntimeError("boom")
        return original()

    small.engine.step = step  # type: ignore[method-assign]
    body = {"prompt": "x", "max_tokens": 30, "stream": True, "ignore_eos": True, "temperature": 0}
    answer = small.post(COMPLETIONS, body)
    events = [line for line in answer.text.split("\n\n") if line.startswith("data:")]
    assert answer.status_code == 200
    assert '"error"' in events[-1] and "boom" in events[-1] and "[DONE]" not in answer.text
    assert small.get("/health").status_code == small.get("/ready").status_code == 503
    after = small.post(COMPLETIONS, body)
    assert after.status_code == 500
    assert after.json()["error"]["type"] == "InternalServerError"
    assert isinstance(small.service.engine.failure, RuntimeError)
    assert "engine died" in caplog.text
    with pytest.raises(EngineDeadError):
        small.service.engine.check([])


def test_metrics_carry_vllms_names_under_our_prefix_and_add_up(
    serve: Callable[..., Api], tiny_directory: Path
) -> None:
    api = serve(tiny_directory)
    body = {"prompt": list(range(20, 60)), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        api.post(COMPLETIONS, body)
    api.post(COMPLETIONS, {"prompt": []})
    values = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            values[sample.name, sample.labels.get("finished_reason")] = sample.value
    assert values["cedar:prompt_tokens_total", None] == 80
    assert values["cedar:generation_tokens_total", None] == 10
    assert values["cedar:prefix_cache_queries_total", None] == 80
    assert values["cedar:prefix_cache_hits_total", None] > 0
    assert values["cedar:request_success_total", "length"] == 2
    assert values["cedar:time_to_first_token_seconds_count", None] == 2
    assert values["cedar:inter_token_latency_seconds_count", None] == 8
    assert values["cedar:e2e_request_latency_seconds_count", None] == 2
    assert values["cedar:num_requests_running", None] == 0
    assert 0 <= values["cedar:kv_cache_usage_perc", None] <= 1
    assert values["cedar:encode_tokens_total", None] > 0


def test_the_live_view_counts_without_showing_a_prompt(small: Api) -> None:
    async def run() -> Any:
        async with small.client() as client:
            with held(small):
                body = {"prompt": "the cat", "max_tokens": 3}
                task = asyncio.create_task(client.post(COMPLETIONS, json=body))
                await asyncio.sleep(0.1)
                seen = await client.get("/v1/requests")
            await task
            return seen

    seen = asyncio.run(run())
    assert "cat" not in seen.text
    document = seen.json()
    assert len(document["data"]) == 1
    assert document["data"][0]["max_tokens"] == 3
    assert document["queue"]["max_waiting"] == 2
    assert document["cache"]["total_blocks"] == 12


def test_the_page_is_served_and_shows_the_live_view(api: Api) -> None:
    page = api.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "v1/requests" in page.text
