"""Logits -> next token ids and log-probabilities. Called by `runner.py`.

Every request is sampled on its own row with its own generator, so a draw does not depend on what
else is in the batch. Order of the steps: penalties, bias, minimum length, temperature, top-k,
top-p, min-p, draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cedar.engine.output import Logprob
from cedar.engine.sampling_params import SamplingParams

#: Float32 logits divided by less could overflow; from here down only equal logits stay in a draw.
_LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Sampled:
    """One drawn token; `logprobs` holds it first, then the most likely ones, when asked for."""

    token_id: int
    logprobs: tuple[Logprob, ...] | None


class TokenCounts:
    """The tokens of one request as its penalties see them; a step adds only what it drew.

    Args:
        prompt: its ids.   vocab_size: length of its logits.
    """

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        unique = dict.fromkeys(prompt)
        # Distinct ids, in the order they came, and how often each is in the output.
        self._places = {token: place for place, token in enumerate(unique)}
        self._ids = torch.zeros(vocab_size, dtype=torch.int64)
        self._ids[: len(unique)] = torch.tensor(list(unique), dtype=torch.int64)
        self._in_output = torch.zeros(vocab_size, dtype=torch.int64)
        self._counted = 0

    def penalise(self, logits: Tensor, params: SamplingParams, output: Sequence[int]) -> Tensor:
        """A copy of `logits [V]` with the penalties of `params`; `output` only ever grows."""
        for token in output[self._counted :]:
            place = self._places.setdefault(token, len(self._places))
            self._ids[place] = token
            self._in_output[place] += 1
        self._counted = len(output)
        ids, counts = self._ids[: len(self._places)], self._in_output[: len(self._places)]
        values = logits[ids]
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            values = torch.where(values > 0, values / penalty, values * penalty)
        if params.presence_penalty or params.frequency_penalty:
            values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        return logits.scatter(0, ids, values)


def new_generator(params: SamplingParams, index: int) -> torch.Generator:
    """Generator of one completion: `seed` and the completion's number decide every draw."""
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed((params.seed + index) % 2**63)
    return generator


def sample(
    logits: Tensor, params: SamplingParams, *, output: Sequence[int], counts: TokenCounts | None,
    end_ids: Sequence[int], generator: torch.Generator,
) -> Sampled:  # fmt: skip
    """Draw one token.

    Args:
        logits: float32 `[V]`.   output: ids drawn so far.
        counts: of the request; only needed when `params.has_penalties`.
        end_ids: ids that may not be drawn before `min_tokens` tokens.
    """
    adjusted = logits.clone() if counts is None else counts.penalise(logits, params, output)
    for token, bias in params.logit_bias.items():
        adjusted[token] += bias
    if len(output) < params.min_tokens and end_ids:
        adjusted[list(end_ids)] = float("-inf")
    if params.is_greedy:
        token = int(adjusted.argmax())
    else:
        # From the maximum down: a tiny temperature then takes the rest to 0, and nothing to inf.
        scaled = (adjusted - adjusted.max()) / max(params.temperature, _LEAST_TEMPERATURE)
        kept = filter_logits(scaled, params)
        noise = torch.empty_like(kept).exponential_(generator=generator)
        token = int((torch.softmax(kept, -1) / noise).argmax())
    if params.logprobs is None:
        return Sampled(token, None)
    return Sampled(token, top_logprobs(adjusted, token, params.logprobs))


def top_logprobs(logits: Tensor, token: int, count: int) -> tuple[Logprob, ...]:
    """The token's entry, then the `count` most likely ones; impossible tokens are left out."""
    values = torch.log_softmax(logits, -1)
    own = values[token]
    entries = [Logprob(token, float(own), int((values > own).sum()) + 1)]
    best = values.topk(min(count, values.shape[0]))
    for rank, (value, index) in enumerate(zip(best.values, best.indices, strict=True), start=1):
        if torch.isfinite(value):
            entries.append(Logprob(int(index), float(value), rank))
    return tuple(entries)


def prompt_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[tuple[Logprob, ...]]:
    """`top_logprobs` of prompt tokens: row i of `logits [n, V]` predicts `tokens[i]`."""
    return [top_logprobs(row, token, count) for row, token in zip(logits, tokens, strict=True)]


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Set what top-k, top-p and min-p exclude to -inf; the most likely token always stays."""
    if 0 < params.top_k < logits.shape[0]:
        worst = logits.topk(params.top_k).values[-1]
        logits = logits.masked_fill(logits < worst, float("-inf"))
    if params.top_p < 1.0:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = torch.softmax(ordered, -1)
        # A token stays while the mass before it is below top_p.
        outside = probabilities.cumsum(-1) - probabilities >= params.top_p
        logits = logits.masked_fill(
            torch.zeros_like(outside).scatter(0, order, outside), float("-inf")
        )
    if params.min_p > 0.0:
        probabilities = torch.softmax(logits, -1)
        logits = logits.masked_fill(
            probabilities < params.min_p * probabilities.max(), float("-inf")
        )
    return logits
