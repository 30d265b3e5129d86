"""The prefix store behind a server: what was read once comes back after a restart, or is read anew."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from server_api import Api
from server_process import running

from cedar.cache.store_files import FileSystem, check_usable, take_lock
from cedar.cli.serve import serve as serve_command
from cedar.config.model_config import ModelConfig
from cedar.engine.random_weights import random_tensors
from cedar.errors import StoreError, UsageError
from cedar.formats.checkpoint import write_checkpoint
from cedar.server.engine_wire import EngineSpec

COMPLETIONS = "/v1/completions"
EXACT = {"encoder_replay": "exact"}
PROMPTS = [[random.Random(seed).randrange(20, 300) for _ in range(60)] for seed in range(20)]
#: Of a prompt of 60 tokens in blocks of 8.
CACHED = 56
#: Four encoder layers of window 8 look 28 rows back, the decoder's tail of 8 reaches 4 into the hit.
REPLAYED = 32


def body_of(prompt: list[int]) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip


def ask(api: Api, prompt: list[int]) -> dict[str, Any]:
    answer = api.post(COMPLETIONS, body_of(prompt))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def said(answer: dict[str, Any]) -> tuple[str, list[int]]:
    return answer["choices"][0]["text"], answer["choices"][0]["token_ids"]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def metrics(text: str) -> dict[tuple[str, str | None], float]:
    """Values by name without the prefix, and by the second label."""
    return {
        (sample.name.removeprefix("cedar:"), sample.labels.get("reason", sample.labels.get("source"))):
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip


@pytest.fixture
def with_store(
    serve: Callable[..., Api], tiny_directory: Path, tmp_path: Path
) -> Callable[..., Api]:
    """`with_store(**engine fields)`: a service over one store directory; stop it before the next."""

    def start(directory: Path = tiny_directory, **engine: Any) -> Api:
        return serve(directory, {**EXACT, "prefix_store_dir": str(tmp_path / "store"), **engine})

    return start


@pytest.fixture(scope="module")
def cold(serve: Callable[..., Api], tiny_directory: Path) -> list[tuple[str, list[int]]]:
    """What a server without any cache says to the prompts."""
    api = serve(tiny_directory, {**EXACT, "enable_prefix_caching": False})
    return [said(ask(api, prompt)) for prompt in PROMPTS]


def test_prompts_sent_before_a_kill_come_back_from_disk_after_a_restart_byte_for_byte(
    tiny_directory: Path, tmp_path: Path, cold: list[tuple[str, list[int]]]
) -> None:
    directory = tmp_path / "store"
    options = ("--prefix-store-dir", str(directory), "--prefix-store-size", "8MiB",
               "--encoder-replay", "exact", "--max-model-len", "96")  # fmt: skip
    headers = {"Authorization": "Bearer sesame"}

    def send(url: str, prompt: list[int]) -> dict[str, Any]:
        answer = httpx.post(
            f"{url}{COMPLETIONS}", json=body_of(prompt), headers=headers, timeout=60
        )
        return dict(answer.json())

    with running(tiny_directory, *options) as (process, url):
        assert [said(send(url, prompt)) for prompt in PROMPTS] == cold
        _wait_until(url, "prefix_store_written_records_total", 20 * 8)
        _refuses_a_second_writer(tiny_directory, directory)
        # The kill comes while something else is being answered and stored.
        busy = threading.Thread(target=_send_and_lose, args=(url, headers))
        busy.start()
        _wait_until(url, "prompt_tokens_total", 21 * 60)
        process.kill()
        process.wait()
        busy.join()
    with running(tiny_directory, *options) as (_, url):
        for number in random.Random(0).sample(range(20), 20):
            answer = send(url, PROMPTS[number])
            assert said(answer) == cold[number]
            assert cached(answer) == CACHED
            assert answer["cedar"]["prefix_cache"] == {
                "matched_tokens": CACHED, "cached_tokens": CACHED, "disk_tokens": CACHED,
                "replayed_tokens": REPLAYED, "miss_reason": None,
            }  # fmt: skip
        values = metrics(httpx.get(f"{url}/metrics").text)
    assert values["prefix_store_read_bytes_total", None] > 0
    assert values["prefix_store_hits_total", None] == 20
    assert values["external_prefix_cache_hits_total", None] == 20 * CACHED


def _wait_until(url: str, name: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while metrics(httpx.get(f"{url}/metrics").text)[name, None] < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _refuses_a_second_writer(model: Path, directory: Path) -> None:
    done = CliRunner().invoke(
        serve_command, [str(model), "--port", "0", "--prefix-store-dir", str(directory)]
    )
    assert isinstance(done.exception, StoreError)
    assert done.exception.exit_code == 5
    assert "is being written by process" in str(done.exception)


def _send_and_lose(url: str, headers: dict[str, str]) -> None:
    body = {**body_of([random.Random(99).randrange(20, 300) for _ in range(60)]), "max_tokens": 30}
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{url}{COMPLETIONS}", json=body, headers=headers, timeout=60)


def test_a_server_that_ends_in_order_closes_its_store_and_the_next_one_opens_it(
    with_store: Callable[..., Api], cold: list[tuple[str, list[int]]]
) -> None:
    first = with_store()
    ask(first, PROMPTS[0])
    first.service.engine.stop()
    assert first.engine.tier is None
    second = with_store()
    answer = ask(second, PROMPTS[0])
    assert (said(answer), cached(answer)) == (cold[0], CACHED)
    second.service.engine.stop()


@pytest.mark.parametrize("change", ["block size", "dtype", "weights", "replay mode"])
def test_with_other_rows_every_prompt_is_a_miss_and_the_answer_is_right(
    with_store: Callable[..., Api], serve: Callable[..., Api], tiny_directory: Path,
    tmp_path: Path, change: str,
) -> None:  # fmt: skip
    first = with_store()
    ask(first, PROMPTS[0])
    first.service.engine.stop()
    directory, engine, load = tiny_directory, {}, {}
    if change == "block size":
        engine = {"block_size": 16}
    elif change == "dtype":
        load = {"dtype": "bfloat16"}
    elif change == "weights":
        directory = shutil.copytree(tiny_directory, tmp_path / "other")
        config = replace(ModelConfig.from_pretrained(directory))
        write_checkpoint(directory, random_tensors(config, 1), config.to_dict())
    else:
        engine = {"encoder_replay": "bounded"}
    fields = {**EXACT, **engine}
    store = {"prefix_store_dir": str(tmp_path / "store")}
    other, plain = (serve(directory, {**fields, **more}, load=load) for more in (store, {}))
    answer = ask(other, PROMPTS[0])
    assert cached(answer) == 0
    assert "no block of this prompt is cached" in answer["cedar"]["prefix_cache"]["miss_reason"]
    assert said(answer) == said(ask(plain, PROMPTS[0]))
    values = metrics(other.get("/metrics").text)
    assert values["prefix_store_read_bytes_total", None] == 0
    assert values["prefix_store_lookups_total", None] == 1
    assert values["prefix_store_hits_total", None] == 0
    other.service.engine.stop()


def test_every_tier_counts_its_own_tokens_and_bytes(
    with_store: Callable[..., Api], tmp_path: Path
) -> None:
    first = with_store()
    ask(first, PROMPTS[0])
    first.service.engine.stop()
    api = with_store(prefix_store_size=4_000_000)
    from_disk, from_memory = ask(api, PROMPTS[0]), ask(api, PROMPTS[0])
    assert from_disk["cedar"]["prefix_cache"]["disk_tokens"] == CACHED
    assert from_memory["cedar"]["prefix_cache"]["disk_tokens"] == 0
    ask(api, PROMPTS[1])
    api.engine.tier.writer.flush(30)  # type: ignore[union-attr]
    values = metrics(api.get("/metrics").text)
    block = api.engine.runner.state.pool.block_bytes
    assert values["prefix_cache_queries_total", None] == 180
    assert values["prefix_cache_hits_total", None] == CACHED
    assert values["external_prefix_cache_queries_total", None] == 60 + 4 + 60
    assert values["external_prefix_cache_hits_total", None] == CACHED
    assert values["prompt_tokens_by_source_total", "local_compute"] == 4 + 4 + 60
    assert values["prompt_tokens_by_source_total", "external_kv_transfer"] == CACHED
    assert values["prompt_tokens_cached_by_source_total", "device"] == CACHED
    assert values["prompt_tokens_cached_by_source_total", "disk"] == CACHED
    assert values["prefix_store_lookups_total", None] == 2
    assert values["prefix_store_hits_total", None] == 1
    assert values["prefix_store_read_bytes_total", None] == 7 * block
    assert values["prefix_store_read_seconds_count", None] == 1
    assert values["prefix_store_written_records_total", None] == 8
    assert values["prefix_store_written_bytes_total", None] == 8 * block
    assert values["prefix_store_records", None] == 16
    assert 0 < values["prefix_store_bytes", None] <= values["prefix_store_limit_bytes", None] == 4e6
    view = api.get("/v1/requests")
    assert str(tmp_path) not in view.text  # counts only: no path, as no prompt
    store = view.json()["store"]
    assert (store["lookups"], store["hits"], store["read_bytes"]) == (2, 1, 7 * block)
    api.service.engine.stop()


def test_without_a_store_nothing_speaks_of_a_disk(api: Api) -> None:
    assert "prefix_store" not in api.get("/metrics").text
    assert api.get("/v1/requests").json()["store"] is None


def test_a_full_disk_costs_no_answer_and_is_counted(
    with_store: Callable[..., Api], cold: list[tuple[str, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    api = with_store()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "write_at", full)
        assert said(ask(api, PROMPTS[0])) == cold[0]
        api.engine.tier.writer.flush(30)  # type: ignore[union-attr]
    assert said(ask(api, PROMPTS[0])) == cold[0]
    values = metrics(api.get("/metrics").text)
    assert values["prefix_store_errors_total", "ENOSPC"] >= 1
    # After the first failure the writer rests: what comes meanwhile is not even queued.
    lost = [
        values.get(("prefix_store_dropped_records_total", why), 0) for why in ("error", "queue")
    ]
    assert lost[0] >= 1
    assert sum(lost) >= 7
    api.service.engine.stop()


def test_a_damaged_record_is_read_once_and_the_prompt_is_computed_from_there(
    with_store: Callable[..., Api], cold: list[tuple[str, list[int]]], tmp_path: Path
) -> None:
    first = with_store()
    ask(first, PROMPTS[0])
    first.service.engine.stop()
    (slab,) = (tmp_path / "store").glob("*.slab")
    data = bytearray(slab.read_bytes())
    data[3 * 4096 + 1000] ^= 1  # in the fourth block
    slab.write_bytes(data)
    for disk_tokens, damaged in ((24, 1), (CACHED, None)):
        api = with_store()
        answer = ask(api, PROMPTS[0])
        assert said(answer) == cold[0]
        assert answer["cedar"]["prefix_cache"]["disk_tokens"] == disk_tokens
        values = metrics(api.get("/metrics").text)
        assert values.get(("prefix_store_damaged_records_total", "damaged")) == damaged
        api.service.engine.stop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prefix-store-size", "8GiB"], "has no effect without a store"),
        (["--prefix-store-windows"], "has no effect without a store"),
        (["--prefix-store-dir", "DIR", "--prefix-store-size", "8G"], "write GB"),
        (["--prefix-store-dir", "DIR", "--prefix-store-size", "much"], "is not a number"),
        (["--prefix-store-dir", "DIR", "--no-enable-prefix-caching"], "contradict each other"),
    ],
)
def test_options_of_the_store_that_cannot_be_honoured_are_refused(
    tmp_path: Path, options: list[str], said: str
) -> None:
    given = [str(tmp_path / "store") if option == "DIR" else option for option in options]
    done = CliRunner().invoke(serve_command, ["preset:tiny", "--port", "0", *given])
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)
    assert not (tmp_path / "store").exists()


def test_a_store_that_is_in_use_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cedar.llm.load", lambda *_, **__: pytest.fail("the model was loaded"))
    held = take_lock(tmp_path)
    try:
        with pytest.raises(StoreError, match=f"is being written by process {os.getpid()} on"):
            EngineSpec("preset:tiny", {"prefix_store_dir": str(tmp_path)}).build()
    finally:
        os.close(held)


def test_a_writer_that_is_about_to_be_gone_is_waited_for(tmp_path: Path) -> None:
    held = take_lock(tmp_path)
    threading.Timer(0.2, os.close, (held,)).start()
    check_usable(tmp_path)


def test_a_store_that_is_too_small_or_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for directory, size, message in (
        (tmp_path / "store", "10kB", "is too small: one record of"),
        (tmp_path / "file", "8MiB", "cannot be used"),
        (tmp_path, "8MiB", "is not a prefix store: it holds 'file'"),
    ):
        given = ["--prefix-store-dir", str(directory), "--prefix-store-size", size]
        done = CliRunner().invoke(serve_command, ["preset:tiny", "--port", "0", *given])
        assert isinstance(done.exception, StoreError)
        assert message in str(done.exception)
