"""The offline API: calls that take turns on one engine, calls that are refused, and the end."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cedar import LLM, SamplingParams
from cedar.cache.kv_pool import fits_memory
from cedar.config.engine_config import EngineConfig
from cedar.config.presets import preset
from cedar.engine.engine import Engine
from cedar.engine.loaded_model import LoadedModel
from cedar.errors import DoesNotFitError, RequestError, UsageError
from cedar.kernels.backends import select_operators
from cedar.llm import encode_prompt
from cedar.loading import from_config, load
from cedar.model_directory import find_tokenizer

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
A, B, C = [5, 6, 7], [9] * 20, [11, 3]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("preset:tiny", dtype="float32")


@pytest.fixture
def llm(model: LoadedModel) -> LLM:
    return LLM(model, max_model_len=64, max_num_seqs=4, block_size=8)


def answer(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate([prompt], GREEDY)[0].outputs[0].token_ids


def test_streams_that_take_turns_each_give_their_own_tokens(llm: LLM) -> None:
    expected = [answer(llm, prompt) for prompt in (A, B, C)]
    first, second = llm.stream(A, GREEDY), llm.stream(B, GREEDY)
    got: list[list[int]] = [[*next(first).token_ids], [], []]
    got[1] += next(second).token_ids
    got[2] = answer(llm, C)  # a whole batch while two streams are open
    got[1] += next(second).token_ids
    for delta in first:
        got[0] += delta.token_ids
    for delta in second:
        got[1] += delta.token_ids
    assert got == expected
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_stream_that_is_left_gives_its_blocks_back_and_disturbs_no_other(
    llm: LLM, steps: int
) -> None:
    expected = answer(llm, B)
    left, other = llm.stream(A, GREEDY), llm.stream(B, GREEDY)
    got = [*next(other).token_ids]
    for _ in range(steps):
        next(left)
    left.close()  # type: ignore[attr-defined]
    assert len(llm.engine.scheduler.running) == 1
    for delta in other:
        got += delta.token_ids
    assert got == expected
    assert not llm.engine.has_work
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_blocks": "4"}, "num_blocks='4' must be an integer of at least 1, or None"),
        ({"num_blocks": 1.5}, "num_blocks=1.5 must be an integer"),
        ({"num_blocks": 0}, "num_blocks=0 must be an integer"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
        ({"prefix_store_windows": 1}, "prefix_store_windows=1 must be True or False"),
        ({"prefix_store_dir": 3}, "prefix_store_dir=3 must be the path of a directory"),
        ({"prefix_store_dir": ""}, "prefix_store_dir='' must be the path of a directory"),
        ({"tokenizer": "nano"}, "tokenizer='nano' is not a Tokenizer; pass Tokenizer.from_"),
        ({"seed": "x"}, "seed='x'; allowed are integers"),
        ({"seed": 2**63}, "seed=9223372036854775808; allowed are integers"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        LLM("preset:tiny", **fields)


@pytest.mark.parametrize("name", [None, 3, ""])
def test_what_is_no_name_of_a_model_is_refused_with_the_names_there_are(name: Any) -> None:
    with pytest.raises(UsageError, match=r"model .* is not a name or a path; pass .* tiny-40"):
        load(name)


def test_half_a_surrogate_pair_in_a_prompt_is_refused_where_it_is() -> None:
    with pytest.raises(RequestError, match=r"'\\udcff', at character 2"):
        encode_prompt("ab\udcff", find_tokenizer("nano"))


def test_a_stream_says_after_each_step_how_much_of_the_prompt_it_has_read(
    model: LoadedModel,
) -> None:
    llm = LLM(model, max_model_len=64, max_num_batched_tokens=8)
    read: list[int] = []
    for delta in llm.stream(B, GREEDY, read.append):
        assert read == [8, 16, 20], delta
    read.clear()
    list(llm.stream(A, replace(GREEDY, max_tokens=1), read.append))
    assert read == [3]


def test_a_stream_of_several_completions_gives_every_token_of_each(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=1, ignore_eos=True)
    expected = [out.token_ids for out in llm.generate([A], params)[0].outputs]
    got: list[list[int]] = [[], [], []]
    for delta in llm.stream(A, params):
        got[delta.index] += delta.token_ids
    assert got == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts=None; pass text or a list of token ids"),
        (b"abc", "prompts=b'abc'; pass text"),
        (5, "prompts=5; pass text"),
        ([[1.5, 2]], "the prompt has 1.5 among its ids"),
        ([1.5, 2], "the prompt has 1.5 among its ids"),
        ([["a"]], "the prompt has 'a' among its ids"),
        ([True, False], "the prompt has True among its ids"),
        ([[5], None], "the prompt is None; pass text"),
        ([b"abc"], "the prompt is b'abc'|the prompt has b'abc' among its ids"),
        ({"prompt": "a"}, "prompts={'prompt': 'a'}; pass text"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_value(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work


def test_a_prompt_may_be_any_sequence_of_integers(llm: LLM) -> None:
    expected = answer(llm, A)
    for prompt in (A, tuple(A), [torch.tensor(A)], [range(5, 8)]):
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == expected  # type: ignore[arg-type]
        assert llm.generate(prompt, [GREEDY])[0].prompt_token_ids == A  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [5, {"n": 1}, [None], "greedy"])
def test_what_is_no_sampling_params_is_refused_with_its_value(llm: LLM, params: Any) -> None:
    with pytest.raises(UsageError, match=r"sampling_params=.*; pass a SamplingParams"):
        llm.generate([A], params)
    with pytest.raises(UsageError, match=r"sampling_params=.*; pass a SamplingParams"):
        next(iter(llm.stream(A, params)))


@pytest.mark.parametrize("name", [5, None, b"nano", ["nano"]])
def test_what_is_no_model_is_refused_with_its_value(name: Any) -> None:
    with pytest.raises(UsageError, match=r"model=.* is not a model; pass a directory"):
        LLM(name)


@pytest.fixture(scope="module")
def short_model() -> LoadedModel:
    """A model with 48 positions."""
    config = replace(preset("tiny"), max_position_embeddings=48)
    return from_config(config, ops=select_operators("auto"))


def test_a_length_beyond_the_models_positions_is_refused_naming_both(
    short_model: LoadedModel,
) -> None:
    message = "max_model_len=49 exceeds the model's max_position_embeddings=48; lower max_model_len"
    with pytest.raises(UsageError, match=message):
        LLM(short_model, max_model_len=49)
    with pytest.raises(UsageError, match=message):
        Engine(short_model, EngineConfig(max_model_len=49))
    assert answer(LLM(short_model, max_model_len=48), A)


def test_the_default_length_is_at_most_the_models_positions(short_model: LoadedModel) -> None:
    llm = LLM(short_model)
    assert llm.engine.config.max_model_len == 48
    with pytest.raises(DoesNotFitError, match=r"prompt 41 \+ 8 > max_model_len 48") as refused:
        llm.generate([[5] * 41], GREEDY)
    assert str(refused.value).endswith(
        "48, which is the model's max_position_embeddings; lower max_tokens to 7"
    )
    with pytest.raises(DoesNotFitError, match=r"embeddings; shorten the prompt$"):
        llm.generate([[5] * 48], GREEDY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_blocks": 10**13},
            r"the KV pool of 10000000000000 blocks of 128 tokens would take \d+ bytes",
        ),
        ({"num_blocks": 10**30}, r"the KV pool of 1000000000000000000000000000000 blocks"),
        (
            {"num_blocks": 1, "max_num_seqs": 10**13},
            r"block tables and windows of 10000000000000 sequences would take",
        ),
    ],
)
def test_memory_that_cannot_be_had_is_said_in_bytes_with_what_to_lower(
    model: LoadedModel, fields: dict[str, int], message: str
) -> None:
    with pytest.raises(DoesNotFitError, match=message) as refused:
        Engine(model, EngineConfig(**fields))  # type: ignore[arg-type]
    for option in ("max_model_len", "max_num_seqs", "num_blocks"):
        assert option in str(refused.value)


@pytest.mark.parametrize("bug", [RuntimeError("shapes do not match"), TypeError("no size")])
def test_another_failure_while_memory_is_taken_is_not_called_a_lack_of_memory(
    bug: Exception,
) -> None:
    with pytest.raises(type(bug), match=str(bug)), fits_memory("a pool", 1000):
        raise bug


@pytest.mark.parametrize("stored", [False, True])
def test_nothing_runs_on_a_closed_llm(stored: bool, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"prefix_store_dir": str(tmp_path / "store")} if stored else {}
    llm = LLM("preset:tiny", max_model_len=64, max_num_seqs=2, block_size=8, **fields)
    stream = llm.stream(B, GREEDY)
    next(stream)
    llm.close()
    llm.close()
    message = "the engine is closed; make a new LLM"
    with pytest.raises(UsageError, match=message):
        list(stream)
    with pytest.raises(UsageError, match=message):
        answer(llm, A)
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks
