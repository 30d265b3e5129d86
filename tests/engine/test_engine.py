"""The engine gives each request the tokens it would get alone, and gives back what it took."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from cedar import LLM, SamplingParams
from cedar.config.engine_config import EngineConfig
from cedar.config.presets import preset
from cedar.engine.engine import Engine
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.request import FinishReason
from cedar.errors import DoesNotFitError, RequestError, UsageError
from cedar.kernels.backends import select_operators
from cedar.loading import from_config, load

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("preset:tiny", dtype="float32")


@pytest.fixture(scope="module")
def smallest() -> LoadedModel:
    """Three layers (full, full, reindex): enough for scheduling, cheap enough for a soak."""
    config = replace(
        preset("tiny"), num_hidden_layers=3, compress_ratios=(2, 1, 1), kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1, 2), candidate_source_layer_id=1, n_routed_experts=2,
    )  # fmt: skip
    return from_config(config, ops=select_operators("auto"), dtype=torch.float32)


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(3, 64) for _ in range(draw.randrange(1, longest))] for _ in range(count)
    ]


def ids_of(llm: LLM, requests: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(requests, params)]


def alone(model: LoadedModel, requests: list[list[int]], **options: object) -> list[list[int]]:
    llm = LLM(model, max_model_len=128, max_num_seqs=1, block_size=8, **options)
    return [ids_of(llm, [request])[0] for request in requests]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 8},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"max_num_seqs": 6, "num_blocks": 20, "max_num_batched_tokens": 32},
        {"max_num_seqs": 4, "decoder_prefill": "full"},
        {"max_num_seqs": 4, "decoder_prefill": "exact", "max_num_batched_tokens": 16},
    ],
    ids=["batched", "small-chunks", "preempting", "full", "exact-chunked"],
)
def test_greedy_output_is_the_same_alone_and_in_any_batch(
    model: LoadedModel, options: dict[str, object]
) -> None:
    requests = prompts(10)
    mode = {k: v for k, v in options.items() if k == "decoder_prefill"}
    together = LLM(model, max_model_len=128, block_size=8, **options)
    assert ids_of(together, requests) == alone(model, requests, **mode)


def test_arrival_order_does_not_change_any_output(model: LoadedModel) -> None:
    requests = prompts(8, seed=1)
    options = {"max_model_len": 128, "block_size": 8, "max_num_seqs": 3}
    forward = ids_of(LLM(model, **options), requests)
    backward = ids_of(LLM(model, **options), requests[::-1])
    assert forward == backward[::-1]


@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5}])
def test_a_preempted_request_resumes_to_the_same_tokens(
    model: LoadedModel, penalties: dict[str, float]
) -> None:
    requests = prompts(6, seed=2, longest=30)
    llm = LLM(model, max_model_len=64, block_size=8, max_num_seqs=6, num_blocks=12)
    seen = []
    original = llm.engine.scheduler.schedule

    def schedule():  # type: ignore[no-untyped-def]
        batch = original()
        seen.extend(batch.preempted)
        return batch

    llm.engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, **penalties)  # type: ignore[arg-type]
    crowded = ids_of(llm, requests, params)
    assert seen, "the pool was meant to be too small for all requests at once"
    roomy = LLM(model, max_model_len=64, block_size=8, max_num_seqs=1)
    assert crowded == [ids_of(roomy, [request], params)[0] for request in requests]


def test_sampling_with_a_seed_does_not_depend_on_the_batch(model: LoadedModel) -> None:
    requests = prompts(5, seed=3)
    params = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    together = ids_of(LLM(model, max_model_len=128, max_num_seqs=5), requests, params)
    single = LLM(model, max_model_len=128, max_num_seqs=1)
    assert together == [ids_of(single, [request], params)[0] for request in requests]


def test_n_completions_of_one_prompt_differ_and_repeat_under_a_seed(model: LoadedModel) -> None:
    params = SamplingParams(n=3, max_tokens=10, temperature=1.0, seed=1, ignore_eos=True)
    llm = LLM(model, max_model_len=64, max_num_seqs=3)
    first = [out.token_ids for out in llm.generate([[5, 6, 7]], params)[0].outputs]
    again = [out.token_ids for out in llm.generate([[5, 6, 7]], params)[0].outputs]
    assert first == again
    assert len({tuple(ids) for ids in first}) == 3


def test_soak_of_random_requests_with_aborts_and_preemptions_leaves_every_block_free(
    smallest: LoadedModel,
) -> None:
    draw = random.Random(4)
    config = EngineConfig(
        max_model_len=48, max_num_seqs=24, max_num_batched_tokens=96, block_size=4, num_blocks=48
    )
    engine = Engine(smallest, config)
    started, preempted, live, ended = 0, 0, [], 0
    while started < 2000 or engine.has_work:
        while started < 2000 and len(live) < 32:
            length, new = draw.randrange(1, 20), draw.randrange(1, 6)
            ids = [draw.randrange(3, 64) for _ in range(length)]
            params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
            engine.add_request(f"r{started}", ids, params)
            live.append(f"r{started}")
            started += 1
        if draw.random() < 0.2:
            victim = draw.choice(live)
            engine.abort(victim)
            live.remove(victim)
        for output in engine.step():
            preempted += output.request.preemptions
            if output.finish_reason is not None:
                ended += 1
                live.remove(output.request.request_id)
        engine.pool.check_integrity()
    assert ended > 1000
    assert preempted > 0
    assert engine.pool.num_free == config.num_blocks
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting


def test_abort_in_every_phase_gives_the_blocks_back(model: LoadedModel) -> None:
    config = EngineConfig(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=8, block_size=8)
    for steps in (0, 1, 3, 8):
        engine = Engine(model, config)
        engine.add_request("a", list(range(3, 43)), GREEDY)
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        engine.abort("a")
        assert not engine.has_work
        assert engine.pool.num_free == engine.pool.num_blocks


def test_end_of_sequence_and_length_are_reported(model: LoadedModel) -> None:
    llm = LLM(model, max_model_len=64, max_num_seqs=1)
    plain = llm.generate([[5, 9, 11]], GREEDY)[0].outputs[0]
    assert plain.finish_reason == "length"
    stop = plain.token_ids[3]
    stopped = llm.generate(
        [[5, 9, 11]], SamplingParams(max_tokens=12, temperature=0, stop_token_ids=[stop])
    )[0].outputs[0]
    assert stopped.finish_reason == FinishReason.STOP.value
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert stopped.stop_reason == stop


def test_min_tokens_holds_the_end_token_back(model: LoadedModel) -> None:
    llm = LLM(model, max_model_len=64, max_num_seqs=1)
    free = llm.generate([[5, 9, 11]], GREEDY)[0].outputs[0].token_ids
    params = SamplingParams(max_tokens=8, min_tokens=6, temperature=0, stop_token_ids=[free[0]])
    held = llm.generate([[5, 9, 11]], params)[0].outputs[0].token_ids
    assert free[0] not in held[:6]


def test_logprobs_put_the_drawn_token_first_and_never_show_impossible_ones(
    model: LoadedModel,
) -> None:
    allowed = {10: 100.0, 11: 100.0}
    bias = dict.fromkeys(range(64), -100.0) | allowed
    params = SamplingParams(max_tokens=3, temperature=1.0, top_k=2, seed=0, logprobs=5,
                            logit_bias=bias, ignore_eos=True)  # fmt: skip
    out = LLM(model, max_model_len=32, max_num_seqs=1).generate([[5]], params)[0].outputs[0]
    assert out.logprobs is not None
    for token, entries in zip(out.token_ids, out.logprobs, strict=True):
        assert token in allowed
        assert entries[0].token_id == token
        assert all(entry.logprob > -1e30 for entry in entries)


@pytest.mark.parametrize(
    ("ids", "params", "error", "message"),
    [
        ([], GREEDY, RequestError, "the prompt has no tokens"),
        ([64], GREEDY, RequestError, "token id 64 is not in the vocabulary; allowed 0..63"),
        ([-1], GREEDY, RequestError, "token id -1"),
        (
            [5] * 30,
            SamplingParams(max_tokens=40),
            DoesNotFitError,
            r"prompt 30 \+ 40 > max_model_len 64; lower max_tokens to 34 or raise --max-model-len",
        ),
    ],
)
def test_requests_that_can_never_run_are_refused_before_any_work(
    model: LoadedModel, ids: list[int], params: SamplingParams, error: type, message: str
) -> None:
    engine = Engine(model, EngineConfig(max_model_len=64, max_num_seqs=1))
    with pytest.raises(error, match=message):
        engine.add_request("a", ids, params)
    assert not engine.has_work


def test_a_request_larger_than_the_pool_is_refused(model: LoadedModel) -> None:
    engine = Engine(model, EngineConfig(max_model_len=64, block_size=8, num_blocks=3))
    with pytest.raises(DoesNotFitError, match="needs 4 blocks of 8 tokens, the pool has 3"):
        engine.add_request("a", [5] * 20, GREEDY)


@pytest.mark.parametrize("field", ["max_model_len", "max_num_seqs", "max_num_batched_tokens"])
def test_a_negative_limit_is_refused_by_name(field: str) -> None:
    with pytest.raises(UsageError, match=f"{field}=-1 must be an integer of at least 1"):
        EngineConfig(**{field: -1})


def test_more_decoding_requests_than_the_token_budget_still_run(model: LoadedModel) -> None:
    requests = prompts(9, seed=5, longest=6)
    llm = LLM(model, max_model_len=64, max_num_seqs=9, max_num_batched_tokens=8, block_size=8)
    assert ids_of(llm, requests) == alone(model, requests)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, r"temperature=-1; allowed are numbers in \[0.0, 100.0\]"),
        ({"top_p": 0}, r"top_p=0; allowed are numbers in \(0.0, 1.0\]"),
        ({"max_tokens": 0}, "max_tokens=0; allowed are integers 1.."),
        ({"n": 2.5}, "n=2.5; allowed are integers 1..128"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens=9; allowed are integers 0..4"),
        ({"stop": [""]}, "every entry must be a non-empty string"),
        ({"logit_bias": {3: 1000.0}}, r"logit_bias\[3\]=1000.0"),
        ({"stop": 5}, "stop=5; allowed is a string or a list of strings, or None"),
        ({"stop": b"x"}, "stop=b'x'; allowed is a string"),
        ({"stop_token_ids": 5}, "stop_token_ids=5; allowed is a list of token ids, or None"),
        ({"stop_token_ids": "5"}, "stop_token_ids='5'; allowed is a list"),
        ({"logit_bias": [3]}, r"logit_bias=\[3\]; allowed is a dict"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"top_p": float("nan")}, "top_p=nan; allowed are numbers"),
    ],
)
def test_sampling_fields_out_of_range_are_refused_with_what_is_allowed(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_none_means_the_default_where_it_does_in_vllm() -> None:
    none = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert none == SamplingParams()
