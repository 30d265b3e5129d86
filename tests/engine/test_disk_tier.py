"""What was read once comes back from disk after a restart, byte for byte or not at all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cedar import LLM, SamplingParams
from cedar.engine.request import Request
from cedar.errors import StoreError, UsageError
from cedar.loading import load

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
OPTIONS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 2, "block_size": 8}


def open_llm(directory: Path, **options: object) -> LLM:
    chosen = {"model": "preset:tiny", "encoder_replay": "exact"} | OPTIONS | options
    return LLM(prefix_store_dir=str(directory), **chosen)


def run(llm: LLM, prompt: list[int]) -> tuple[list[int], Request]:
    request = llm.engine.add_request(f"r{random.random()}", prompt, PARAMS)
    while llm.engine.has_work:
        llm.engine.step()
    return request.output_ids, request


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 64) for _ in range(length)]


def cold(prompt: list[int]) -> list[int]:
    return LLM("preset:tiny", **OPTIONS).generate([prompt], PARAMS)[0].outputs[0].token_ids


def test_a_prompt_comes_back_from_disk_after_a_restart_and_says_the_same(tmp_path: Path) -> None:
    prompts = [prompt_of(60, seed) for seed in range(5)]
    with open_llm(tmp_path) as llm:
        first = [run(llm, prompt)[0] for prompt in prompts]
    with open_llm(tmp_path) as llm:
        for prompt, expected in zip(prompts, first, strict=True):
            again, request = run(llm, prompt)
            assert again == expected == cold(prompt)
            assert request.cached_tokens == request.disk_tokens == 56
        assert llm.engine.tier is not None
        assert llm.engine.tier.store.stats().counts["loaded_bytes"] > 0


def test_rows_read_from_disk_serve_the_next_request_from_memory(tmp_path: Path) -> None:
    prompt = prompt_of(60)
    with open_llm(tmp_path) as llm:
        run(llm, prompt)
    with open_llm(tmp_path) as llm:
        run(llm, prompt)
        _, third = run(llm, prompt)
        assert (third.cached_tokens, third.disk_tokens) == (56, 0)


@pytest.mark.parametrize(
    "change",
    [{"block_size": 16}, {"dtype": "bfloat16"}, {"seed": 1}, {"index_key_rule": "as_shipped"},
     {"encoder_replay": "bounded"}],
    ids=["block-size", "dtype", "weights", "index-key-rule", "replay-mode"],
)  # fmt: skip
def test_anything_that_changes_rows_makes_every_lookup_a_miss(
    tmp_path: Path, change: dict[str, object]
) -> None:
    prompt = prompt_of(60)
    with open_llm(tmp_path) as llm:
        run(llm, prompt)
    with open_llm(tmp_path, **change) as llm:
        _, request = run(llm, prompt)
        assert request.cached_tokens == 0


def test_a_killed_process_leaves_a_store_that_answers_correctly(tmp_path: Path) -> None:
    prompt = prompt_of(60)
    script = (
        "from pathlib import Path; import sys; sys.path.insert(0, sys.argv[2]); "
        "import test_disk_tier as t; llm = t.open_llm(Path(sys.argv[1])); "
        "t.run(llm, t.prompt_of(60)); llm.engine.tier.writer.flush(); print('ready', flush=True); "
        "t.run(llm, t.prompt_of(200, 1)); import time; time.sleep(60)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with open_llm(tmp_path) as llm:
        again, request = run(llm, prompt)
    assert request.disk_tokens == 56
    assert again == cold(prompt)


def test_many_conversations_never_get_each_others_rows(tmp_path: Path) -> None:
    prompts = [prompt_of(30, seed) for seed in range(30)]
    with open_llm(tmp_path, num_blocks=40) as llm:
        first = [run(llm, prompt)[0] for prompt in prompts]
    random.Random(1).shuffle(order := list(range(30)))
    with open_llm(tmp_path, num_blocks=40) as llm:
        for number in order:
            again, request = run(llm, prompts[number])
            assert again == first[number]
            assert request.cached_tokens == 24


def test_a_hit_on_disk_that_cannot_be_admitted_is_not_read_and_runs_when_there_is_room(
    tmp_path: Path,
) -> None:
    # 17 blocks: the first request takes 5 and grows to 8, the second needs 13 and finds 12 on disk.
    long, short = prompt_of(100), prompt_of(40, 1)
    with open_llm(tmp_path) as llm:
        expected, _ = run(llm, long)
    with open_llm(tmp_path, num_blocks=17) as llm:
        engine = llm.engine
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        engine.add_request("short", short, params)
        waiting = engine.add_request("long", long, PARAMS)
        assert engine.tier is not None
        for step in range(50):
            engine.step()
            if engine.find("short") is not None:
                assert engine.tier.stats().read_bytes == 0, step
            if not engine.has_work:
                break
        assert not engine.has_work
        assert waiting.output_ids == expected
        assert waiting.cached_tokens == waiting.disk_tokens == 96
        stats = engine.tier.stats()
        assert (stats.lookups, stats.hits) == (2, 1)
        assert stats.read_bytes == 12 * engine.runner.state.pool.block_bytes


def test_a_block_that_memory_lost_from_the_middle_is_filled_in_from_disk(tmp_path: Path) -> None:
    prompt = prompt_of(60)
    with open_llm(tmp_path) as llm:
        pool, tier = llm.engine.pool, llm.engine.tier
        assert tier is not None
        expected, first = run(llm, prompt)
        assert tier.writer.flush(30)
        lost = pool.lookup(first.keys[2])
        assert lost is not None
        pool._withdraw(lost)
        again, hit = run(llm, prompt)
        assert again == expected
        assert (hit.cached_tokens, hit.disk_tokens) == (56, 40)
        pool.check_integrity()
        assert pool.num_free == pool.num_blocks
        assert len(pool.longest_prefix(hit.keys)) == 8


def test_prompt_log_probabilities_read_nothing_from_disk(tmp_path: Path) -> None:
    prompt = prompt_of(60)
    with open_llm(tmp_path) as llm:
        run(llm, prompt)
    with open_llm(tmp_path) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        request = llm.engine.add_request("scored", prompt, params)
        while llm.engine.has_work:
            llm.engine.step()
        assert request.miss_reason is not None
        assert llm.engine.tier is not None
        assert llm.engine.tier.stats().lookups == 0


def test_a_tilde_in_the_directory_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_llm(Path("~/store")):
        assert (tmp_path / "store" / "LOCK").is_file()


def test_the_offline_api_says_how_much_came_from_the_cache_and_takes_sizes_with_units(
    tmp_path: Path,
) -> None:
    prompt = prompt_of(60)
    for cached in (0, 56):
        with open_llm(tmp_path, prefix_store_size="4MiB") as llm:
            assert llm.engine.config.prefix_store_size == 4 << 20
            assert llm.generate([prompt], PARAMS)[0].num_cached_tokens == cached
    for size, message in (("4G", "write GB"), (0, "at least 1"), (1.5, "whole number of bytes")):
        with pytest.raises(UsageError, match=message):
            open_llm(tmp_path, prefix_store_size=size)


@pytest.mark.parametrize("name", ["tiny", "tiny-article", "tiny-40"])
def test_layers_without_rows_of_their_own_never_shorten_what_comes_back(
    tmp_path: Path, name: str
) -> None:
    prompt = prompt_of(60)
    with open_llm(tmp_path, model=f"preset:{name}") as llm:
        expected, _ = run(llm, prompt)
    with open_llm(tmp_path, model=f"preset:{name}") as llm:
        again, request = run(llm, prompt)
    assert request.disk_tokens == 56
    assert again == expected


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    with open_llm(tmp_path), pytest.raises(StoreError, match=str(os.getpid())):
        open_llm(tmp_path)


def test_a_loaded_model_cannot_name_its_weights_for_a_store(tmp_path: Path) -> None:
    model = load("preset:tiny")
    with pytest.raises(UsageError, match="needs the model by name"):
        LLM(model, prefix_store_dir=str(tmp_path))
