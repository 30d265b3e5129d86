"""Drawing a token: where the arithmetic could leave the numbers, and what must not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from cedar.config.engine_config import EngineConfig
from cedar.engine.engine import Engine
from cedar.engine.request import Request
from cedar.engine.sampler import TokenCounts, new_generator, sample
from cedar.engine.sampling_params import SamplingParams
from cedar.loading import load


def draw(logits: torch.Tensor, seed: int = 0, **fields: object) -> int:
    params = SamplingParams(seed=seed, **fields)  # type: ignore[arg-type]
    return sample(
        logits, params, output=[], counts=None, end_ids=[], generator=new_generator(params, 0)
    ).token_id


def some_logits(seed: int) -> torch.Tensor:
    return torch.randn(512, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-40, 1e-300, 5e-324])
@pytest.mark.parametrize("offset", [0.0, -100.0, 1000.0])
def test_a_tiny_temperature_draws_what_greedy_takes(temperature: float, offset: float) -> None:
    for seed in range(5):
        logits = some_logits(seed) + offset
        expected = draw(logits, temperature=0)
        assert draw(logits, seed, temperature=temperature) == expected
        assert draw(logits, seed, temperature=temperature, top_p=0.9, min_p=0.1) == expected
        logits[expected] = float("-inf")  # a masked best token stays masked
        assert draw(logits, seed, temperature=temperature) == draw(logits, temperature=0)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7, 100.0])
def test_an_ordinary_draw_is_that_of_the_plain_formula(temperature: float) -> None:
    for seed in range(200):
        logits = some_logits(seed)
        noise = torch.empty(512).exponential_(generator=torch.Generator().manual_seed(seed))
        plain = int((torch.softmax(logits / temperature, -1) / noise).argmax())
        assert draw(logits, seed, temperature=temperature) == plain


@pytest.mark.parametrize("repetition", [1.0, 0.7, 1.3])
@pytest.mark.parametrize(("presence", "frequency"), [(0.0, 0.0), (0.5, 0.0), (-0.25, 0.75)])
def test_penalties_are_those_of_the_plain_formulas_after_every_token(
    repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    prompt, drawn = [3, 500, 3, 7], [7, 9, 9, 511, 9, 0]
    counts = TokenCounts(prompt, 512)
    for length in range(len(drawn) + 1):
        logits, output = some_logits(length), drawn[:length]
        expected = logits.tolist()
        for token in {*prompt, *output}:
            expected[token] *= 1 / repetition if expected[token] > 0 else repetition
        for token, times in Counter(output).items():
            expected[token] -= frequency * times + presence
        before = logits.clone()
        torch.testing.assert_close(
            counts.penalise(logits, params, output), torch.tensor(expected), rtol=1e-6, atol=1e-6
        )
        assert torch.equal(logits, before)


class Watched(tuple[int, ...]):
    """A prompt that says how often it is gone through from its first id on."""

    times: int

    def __iter__(self) -> Iterator[int]:
        self.times = getattr(self, "times", 0) + 1
        return super().__iter__()


def test_penalties_do_not_go_through_the_prompt_again_for_every_token() -> None:
    engine = Engine(load("preset:tiny"), EngineConfig(max_model_len=64, max_num_seqs=1))
    params = SamplingParams(
        max_tokens=20, repetition_penalty=1.2, presence_penalty=0.5, ignore_eos=True
    )
    prompt = Watched([5, 6, 7])
    engine.submit(Request("a", prompt, params))
    engine.step()
    read = prompt.times
    while engine.has_work:
        engine.step()
    assert prompt.times == read
