"""Drawing a token: where the arithmetic could leave the numbers, and what must not change."""

from __future__ import annotations

import pytest
import torch

from cedar.engine.sampler import new_generator, sample
from cedar.engine.sampling_params import SamplingParams


def draw(logits: torch.Tensor, seed: int = 0, **fields: object) -> int:
    params = SamplingParams(seed=seed, **fields)  # type: ignore[arg-type]
    return sample(
        logits, params, prompt=[1], output=[], end_ids=[], generator=new_generator(params, 0)
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
