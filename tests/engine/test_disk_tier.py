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


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    with open_llm(tmp_path), pytest.raises(StoreError, match=str(os.getpid())):
        open_llm(tmp_path)


def test_a_loaded_model_cannot_name_its_weights_for_a_store(tmp_path: Path) -> None:
    model = load("preset:tiny")
    with pytest.raises(UsageError, match="needs the model by name"):
        LLM(model, prefix_store_dir=str(tmp_path))
