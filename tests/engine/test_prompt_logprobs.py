"""Log-probabilities of prompt tokens come from rows that really ran, in every mode and chunking."""

from __future__ import annotations

import pytest
import torch

from cedar import LLM, SamplingParams
from cedar.engine.engine import Engine, EngineConfig
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.request import Request
from cedar.loading import load

PROMPT = [(7 * i + 3) % 60 for i in range(40)]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("preset:tiny", dtype="float32")


def run(model: LoadedModel, params: SamplingParams, **options: object) -> Request:
    config = EngineConfig(max_model_len=64, max_num_seqs=2, block_size=8, **options)  # type: ignore[arg-type]
    engine = Engine(model, config)
    engine.add_request("other", PROMPT[::-1], SamplingParams(max_tokens=4, temperature=0))
    request = engine.add_request("scored", PROMPT, params)
    while engine.has_work:
        engine.step()
    return request


@pytest.mark.parametrize("mode", ["report", "cut", "exact", "full"])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_prompt_logprobs_equal_the_uncached_model_though_the_engine_skips_decoder_rows(
    model: LoadedModel, mode: str, chunk: int
) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3)
    request = run(model, params, decoder_prefill=mode, max_num_batched_tokens=chunk)
    expected = torch.log_softmax(model.score(torch.tensor([PROMPT]))[0], -1)
    assert request.prompt_logprobs[0] is None
    assert len(request.prompt_logprobs) == len(PROMPT)
    for position, entries in enumerate(request.prompt_logprobs[1:], start=1):
        assert entries is not None and len(entries) == 4
        row = expected[position - 1]
        assert entries[0].token_id == PROMPT[position]
        for entry in entries:
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-4)


def test_a_scored_request_goes_on_as_with_the_full_decoder(model: LoadedModel) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    full = LLM(model, max_model_len=64, block_size=8, decoder_prefill="full")
    expected = full.generate([PROMPT], params)[0].outputs[0].token_ids
    scored = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0)
    assert run(model, scored, decoder_prefill="report").output_ids == expected


def test_prompt_logprobs_are_complete_after_a_preemption_and_never_come_from_the_prefix_cache(
    model: LoadedModel,
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, prompt_logprobs=0)
    config = EngineConfig(max_model_len=64, max_num_seqs=3, block_size=8, num_blocks=14,
                          enable_prefix_caching=True)  # fmt: skip
    engine = Engine(model, config)
    requests = [engine.add_request(f"r{i}", PROMPT, params) for i in range(3)]
    while engine.has_work:
        engine.step()
    assert max(request.preemptions for request in requests) > 0
    assert all(request.cached_tokens == 0 for request in requests)
    values = [[e and e[0].logprob for e in request.prompt_logprobs] for request in requests]
    assert all(len(value) == len(PROMPT) for value in values)
    for other in values[1:]:
        assert other[1:] == pytest.approx(values[0][1:], abs=1e-5)
