"""Runs of one request, and of many with aborts; shared by the tests of windows in memory and on disk."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from cedar.cache.transfer import block_payload
from cedar.config.engine_config import EngineConfig
from cedar.engine.engine import Engine
from cedar.engine.loaded_model import LoadedModel
from cedar.engine.request import Request
from cedar.engine.sampling_params import SamplingParams

Exact = Callable[..., LoadedModel]
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
BLOCK = WINDOW = 8


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 64) for _ in range(length)]


def engine_of(model: LoadedModel, **fields: object) -> Engine:
    chosen = {"max_model_len": 256, "max_num_seqs": 2, "block_size": BLOCK,
              "enable_prefix_caching": True} | fields  # fmt: skip
    return Engine(model, EngineConfig(**chosen))  # type: ignore[arg-type]


def run(
    engine: Engine, prompt: list[int], salt: bytes = b"", params: SamplingParams = PARAMS
) -> Request:
    request = engine.add_request(f"r{random.random()}", prompt, params, cache_salt=salt)
    while engine.has_work:
        engine.step()
    return request


def run_with_aborts(
    engine: Engine, prompts: Sequence[list[int]], expected: Sequence[list[int]], draw: random.Random
) -> list[Request]:
    """All prompts at once, some aborted; whatever was said is the beginning of what is expected."""
    requests = [engine.add_request(f"{n}", p, PARAMS) for n, p in enumerate(prompts)]
    while engine.has_work:
        engine.step()
        engine.pool.check_integrity()
        if draw.random() < 0.05:
            engine.abort(str(draw.randrange(len(prompts))))
    for request, output in zip(requests, expected, strict=True):
        assert request.output_ids == output[: len(request.output_ids)]
        assert not request.windows
    return requests


def rows_of(engine: Engine, request: Request) -> list[bytes]:
    """Rows of all full blocks of a request that has ended."""
    blocks = [engine.pool.lookup(key) for key in request.keys]
    return [block_payload(engine.runner.state.pool, b) for b in blocks if b is not None]
