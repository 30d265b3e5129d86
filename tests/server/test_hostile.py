"""Bodies that no honest client sends: an answer below 500 for every one, and no block is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_api import Api

#: Bodies in one example: 80 x 25 = 2,000 requests.
EXAMPLES, BATCH = 80, 25

odd = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20),
    st.lists(st.integers(-3, 400), max_size=5), st.dictionaries(st.text(max_size=5), st.integers()),
)  # fmt: skip
text = st.text(max_size=30)
ids = st.lists(st.integers(0, 299), min_size=1, max_size=20)
message = st.one_of(
    odd,
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "root"]),
         "content": st.one_of(text, odd, st.lists(st.fixed_dictionaries({"type": text, "text": text}),
                                                  max_size=2))},
        optional={"tool_calls": odd, "name": odd, "reasoning_content": odd},
    ),
)  # fmt: skip
fields = {
    "max_tokens": st.one_of(st.integers(-1, 8), odd), "n": st.one_of(st.integers(0, 3), odd),
    "temperature": st.one_of(st.floats(0, 2), odd), "top_p": st.one_of(st.floats(0, 1), odd),
    "top_k": st.one_of(st.integers(-1, 500), odd), "min_p": odd, "seed": odd,
    "stop": st.one_of(text, st.lists(text, max_size=3), odd), "stop_token_ids": odd,
    "stream": st.one_of(st.booleans(), odd), "stream_options": odd, "logit_bias": odd,
    "presence_penalty": odd, "repetition_penalty": odd, "min_tokens": odd, "ignore_eos": odd,
    "logprobs": st.one_of(st.integers(0, 25), odd), "top_logprobs": odd, "echo": odd,
    "model": st.one_of(st.just("tiny"), odd), "tools": odd, "tool_choice": odd, "cache_salt": odd,
    "response_format": odd, "chat_template_kwargs": odd, "reasoning_effort": odd,
    "continue_final_message": odd, "add_generation_prompt": odd, "skip_special_tokens": odd,
    "return_token_ids": odd, "suffix": odd, "best_of": odd, "max_completion_tokens": odd,
}  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    path = draw(st.sampled_from(
        ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
    ))  # fmt: skip
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True))
    body: dict[str, Any] = {"max_tokens": 3}  # answers are short unless the draw says otherwise
    body |= {name: draw(fields[name]) for name in names}
    if draw(st.integers(0, 9)):
        body["messages"] = draw(st.one_of(st.lists(message, max_size=3), odd))
        body["prompt"] = draw(st.one_of(text, ids, st.lists(text, max_size=2), odd))
        body["tokens"] = draw(st.one_of(ids, odd))
    return path, body if draw(st.integers(0, 30)) else draw(odd)


@pytest.mark.timeout(900)
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(requests(), min_size=BATCH, max_size=BATCH))
def test_two_thousand_odd_requests_cause_no_server_error_and_lose_no_block(
    api: Api, batch: list[tuple[str, Any]]
) -> None:
    async def run() -> list[Any]:
        async with api.client() as client:
            return await asyncio.gather(*(_send(client, path, body) for path, body in batch))

    for (path, body), answer in zip(batch, asyncio.run(run()), strict=True):
        assert answer.status_code < 500, (path, body, answer.text)
        assert '"InternalServerError"' not in answer.text, (path, body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == answer.status_code
    api.settle()
    assert api.used_blocks == 0 and not api.service.active
    api.engine.pool.check_integrity()


async def _send(client: Any, path: str, body: Any) -> Any:
    raw = json.dumps(body).encode()  # NaN, infinities and lone surrogates included
    return await client.post(path, content=raw)
