"""The official `openai` package reads every kind of answer of a service in this process.

Sockets, a process and signals: `test_serve_process.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import openai
import pytest
from server_api import Api
from test_chat import CALL, TOOL, USER, script_of

T = TypeVar("T")


def ask(api: Api, work: Callable[[openai.AsyncOpenAI], Awaitable[T]]) -> T:
    """What `work` does with a client of the service."""

    async def run() -> T:
        async with api.client() as transport:
            client = openai.AsyncOpenAI(
                base_url="http://cedar/v1", api_key="none", http_client=transport, max_retries=0
            )
            return await work(client)

    return asyncio.run(run())


def test_tool_calls_reach_the_client_whole_and_streamed(
    dsml_api: Api, scripted: Callable[[list[int]], None]
) -> None:
    ids = script_of(dsml_api, f"I look.</think>\n\n{CALL}")
    scripted(ids)
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [TOOL],
                              "max_tokens": len(ids)}  # fmt: skip

    async def work(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        whole = await client.chat.completions.create(**fields)
        stream = await client.chat.completions.create(**fields, stream=True)
        return whole, [chunk async for chunk in stream]

    whole, chunks = ask(dsml_api, work)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.reasoning_content == "I look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert call.function.arguments == '{"city": "Oslo"}'
    deltas = [chunk.choices[0].delta for chunk in chunks]
    (streamed,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert streamed.index == 0 and streamed.function.name == "weather"
    assert streamed.function.arguments == call.function.arguments
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_and_its_result_go_back_into_the_conversation(dsml_api: Api) -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}  # fmt: skip
    messages: list[Any] = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                           {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]  # fmt: skip

    async def work(client: openai.AsyncOpenAI) -> Any:
        tools: Any = [TOOL]
        return await client.chat.completions.create(
            model="tiny", messages=messages, tools=tools, max_tokens=2
        )

    assert ask(dsml_api, work).usage.prompt_tokens > 20


def test_streamed_completions_with_logprobs_join_to_the_whole_answer(api: Api) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "the cat", "max_tokens": 6, "logprobs": 2,
                              "temperature": 0, "extra_body": {"ignore_eos": True}}  # fmt: skip

    async def work(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        whole = await client.completions.create(**fields)
        stream = await client.completions.create(**fields, stream=True)
        return whole, [chunk async for chunk in stream]

    whole, chunks = ask(api, work)
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    assert tokens == whole.choices[0].logprobs.tokens and len(tokens) == 6


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "weather"}}],
    ids=["required", "named"],
)
def test_a_forced_call_is_refused_with_what_is_allowed(dsml_api: Api, choice: Any) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        tools: Any = [TOOL]
        messages: Any = USER
        await client.chat.completions.create(
            model="tiny", messages=messages, tools=tools, tool_choice=choice
        )

    with pytest.raises(openai.BadRequestError, match=r"tool_choice=.*'auto'.*'none'") as caught:
        ask(dsml_api, work)
    assert caught.value.param == "tool_choice"


def test_a_fault_in_the_middle_of_a_stream_raises_in_the_client(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cedar.server.completion import Completion

    original = Completion.take

    def take(self: Completion, output: Any) -> Any:
        if self.num_tokens == 2:
            raise RuntimeError("boom")
        return original(self, output)

    monkeypatch.setattr(Completion, "take", take)

    async def work(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(
            model="tiny", prompt="the", max_tokens=9, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            pass

    with pytest.raises(openai.APIError, match="internal error"):
        ask(api, work)
    assert "boom" in caplog.text
    api.settle()
    assert api.used_blocks == 0 and not api.service.active
