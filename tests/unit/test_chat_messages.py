"""Pins the checks on messages from clients: what is refused, and that it is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.errors import RequestError
from cedar.text.messages import MAX_JSON_DEPTH, Message, parse_messages, parse_tools


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


USER = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_message_is_read_with_all_its_keys() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "reasoning": "r",
        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"x": [1]}'}}],
        "audio": None,
    }
    (parsed,) = parse_messages([message])
    assert parsed.parts == ("a", "b")
    assert parsed.text() == "a\n\nb"
    assert parsed.reasoning == "r"
    assert parsed.tool_calls[0].name == "f"
    assert parsed.tool_calls[0].arguments == {"x": [1]}


def test_reasoning_content_comes_before_reasoning() -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "a", "reasoning": "b"}
    assert parse_messages([message])[0].reasoning == "a"


def test_a_call_without_arguments_may_send_an_empty_string() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": ""}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert parse_messages([message])[0].tool_calls[0].arguments == {}


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "empty"),
        ("Hi", "messages", "list"),
        (["Hi"], "messages[0]", "str"),
        ([USER, {"role": "wizard", "content": "x"}], "messages[1].role", "'wizard'"),
        ([{"content": "x"}], "messages[0].role", "None"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "system, developer"),
        ([{"role": "user"}], "messages[0].content", "null"),
        ([{"role": "user", "content": 3}], "messages[0].content", "int"),
        ([{"role": "tool", "content": None}], "messages[0].content", "null"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "'str'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
            "'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            "messages[0].content[0].text",
            "string",
        ),
        ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls", "user"),
        (
            [{"role": "assistant", "content": "", "tool_calls": CALL}],
            "messages[0].tool_calls",
            "dict",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}],
            "messages[0].tool_calls[0]",
            "name",
        ),
        ([{**USER, "task": 1}], "messages[0].task", "int"),
        ([{**USER, "content": "\ud800"}], "messages[0].content", "surrogate"),
        ([{**USER, "x": {"y": nested(MAX_JSON_DEPTH)}}], "messages[0].x", "nested"),
        ([{**USER, "x": float("nan")}], "messages[0].x", "nan"),
        ([{**USER, "x": {1: 2}}], "messages[0].x", "key 1"),
        ([{**USER, "x": b""}], "messages[0].x", "bytes"),
    ],
)
def test_a_bad_message_is_refused_and_named(messages: Any, param: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(messages)
    assert caught.value.param == param
    assert says in str(caught.value)
    str(caught.value).encode()  # the error itself can be sent


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", "NaN", '{"x": NaN}', None, 3, "[" * 10**5])
def test_arguments_that_are_no_json_object_are_refused(arguments: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError) as caught:
        parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert str(caught.value.param).startswith("messages[0].tool_calls[0].function.arguments")


@pytest.mark.parametrize(
    "tools",
    [
        "f",
        {"type": "function"},
        ["f"],
        [{"type": "function"}],
        [{"type": "web_search", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": 1}}],
        [{"type": "function", "function": {"name": "f", "parameters": nested(200)}}],
    ],
)
def test_a_bad_tool_is_refused(tools: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tools(tools)
    assert str(caught.value.param).startswith("tools")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
keys = st.sampled_from(
    ["role", "content", "tool_calls", "tool_call_id", "task", "tools", "reasoning", "function"]
)
roles = st.sampled_from(["user", "assistant", "tool", "system"])


@settings(max_examples=40)
@given(
    messages=st.lists(
        st.dictionaries(keys, json_values | roles | st.lists(st.just(CALL))) | json_values
    )
)
def test_whatever_is_sent_is_read_or_refused(messages: Any) -> None:
    try:
        parsed = parse_messages(messages)
    except RequestError as error:
        assert error.param
    else:
        assert all(isinstance(message, Message) for message in parsed)
