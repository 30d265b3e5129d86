"""Pins the DeepSeek-V4.1 prompt format: golden prompts for every rule, and that text stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.errors import CheckpointError, RequestError
from cedar.text.deepseek_markers import CALLS_OPEN, DSML, REQUIRED_MARKERS, TASK_MARKERS
from cedar.text.deepseek_v41 import PromptOptions, render
from cedar.text.segments import Marker, Text, to_text

# Spelled out, not imported: these are the released strings.
BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
S, U, A = "<\uff5cSystem\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
D = "\uff5cDSML\uff5c"
REMINDER = "<\uff5clatest_reminder\uff5c>"
HIGH = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
PLAIN = PromptOptions(thinking=False)


def system(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **more}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(content: str, call_id: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d\u00e9crit"}}


ONE_CALL = assistant("", tool_calls=[call("a", "f", "{}")])
ONE_CALL_TEXT = f'\n\n<{D} calls>\n<{D} invoke name="f">\n\n</{D} invoke>\n</{D} calls>{EOS}'

GOLDEN: dict[str, tuple[list[dict[str, Any]], PromptOptions, str]] = {
    "a user message, thinking": (
        [user("Hi")],
        PromptOptions(),
        f"{BOS}{S}{HIGH}{U}Hi{A}<think>",
    ),
    "a user message, not thinking": ([user("Hi")], PLAIN, f"{BOS}{U}Hi{A}</think>"),
    "a system message shares its marker with the effort": (
        [system("Be brief."), user("Hi")],
        PromptOptions(),
        f"{BOS}{S}{HIGH}Be brief.{U}Hi{A}<think>",
    ),
    "a system message without effort has the marker alone": (
        [system("Be brief."), user("Hi")],
        PLAIN,
        f"{BOS}{S}Be brief.{U}Hi{A}</think>",
    ),
    "a developer message is a system message": (
        [{"role": "developer", "content": "Be brief."}, user("Hi")],
        PLAIN,
        f"{BOS}{S}Be brief.{U}Hi{A}</think>",
    ),
    "a system message in mid-conversation is answered like a user's": (
        [user("Hi"), assistant("Hello", reasoning_content="r"), system("Now rhyme.")],
        PromptOptions(),
        f"{BOS}{S}{HIGH}{U}Hi{A}</think>Hello{EOS}{S}Now rhyme.{A}<think>",
    ),
    "a user message before a system message gets no header": (
        [user("Hi"), system("Rhyme."), assistant("Ho")],
        PromptOptions(thinking=False, add_generation_prompt=False),
        f"{BOS}{U}Hi{S}Rhyme.{A}</think>Ho{EOS}",
    ),
    "reasoning before the last user message is dropped": (
        [user("1"), assistant("2", reasoning_content="r"), user("3")],
        PromptOptions(),
        f"{BOS}{S}{HIGH}{U}1{A}</think>2{EOS}{U}3{A}<think>",
    ),
    "reasoning after the last user message is kept": (
        [user("1"), assistant("2", reasoning_content="r2"), assistant("3", reasoning="r3")],
        PromptOptions(add_generation_prompt=False),
        f"{BOS}{S}{HIGH}{U}1{A}<think>r2</think>2{EOS}r3</think>3{EOS}",
    ),
    "all reasoning is kept on request": (
        [user("1"), assistant("2", reasoning_content="r"), user("3")],
        PromptOptions(drop_thinking=False),
        f"{BOS}{S}{HIGH}{U}1{A}<think>r</think>2{EOS}{U}3{A}<think>",
    ),
    "without thinking no reasoning is written": (
        [user("1"), assistant("2", reasoning_content="r"), user("3")],
        PromptOptions(thinking=False, drop_thinking=False),
        f"{BOS}{U}1{A}</think>2{EOS}{U}3{A}</think>",
    ),
    "text parts are joined by a blank line": (
        [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        PLAIN,
        f"{BOS}{U}a\n\nb{A}</think>",
    ),
    "neighbouring user messages are one turn": (
        [user("a"), user("b")],
        PLAIN,
        f"{BOS}{U}a\n\nb{A}</think>",
    ),
    "tool results are part of the user's turn, in the order of the calls": (
        [
            user("q"),
            assistant("", tool_calls=[call("a", "f", "{}"), call("b", "g", {})]),
            result("from b", "b"),
            result("from a", "a"),
            user("and?"),
        ],
        PLAIN,
        f'{BOS}{U}q{A}</think>\n\n<{D} calls>\n<{D} invoke name="f">\n\n</{D} invoke>\n'
        f'<{D} invoke name="g">\n\n</{D} invoke>\n</{D} calls>{EOS}'
        f"{U}<tool_result>from a</tool_result>\n\n<tool_result>from b</tool_result>\n\nand?"
        f"{A}</think>",
    ),
    "results keep their places among the user's text": (
        [
            assistant(None, tool_calls=[call("a", "f", ""), call("b", "f", "{}")]),
            result("B", "b"),
            user("x"),
            result("A", "a"),
        ],
        PLAIN,
        f'{BOS}\n\n<{D} calls>\n<{D} invoke name="f">\n\n</{D} invoke>\n'
        f'<{D} invoke name="f">\n\n</{D} invoke>\n</{D} calls>{EOS}'
        f"{U}<tool_result>A</tool_result>\n\nx\n\n<tool_result>B</tool_result>{A}</think>",
    ),
    "results without known ids keep their order": (
        [ONE_CALL, result("1", None), result("2", "zz")],
        PLAIN,
        f"{BOS}{ONE_CALL_TEXT}{U}<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>"
        f"{A}</think>",
    ),
    "arguments: strings raw, other values JSON without ASCII escapes": (
        [
            user("q"),
            assistant(
                "Looking.",
                tool_calls=[
                    call("a", "f", json.dumps({"s": 'a "b"\n\u00e9', "n": 1.5, "o": ["\u4e2d"]}))
                ],
            ),
        ],
        PromptOptions(thinking=False, add_generation_prompt=False),
        f'{BOS}{U}q{A}</think>Looking.\n\n<{D} calls>\n<{D} invoke name="f">\n'
        f'<{D} parameter name="s" string="true">a "b"\n\u00e9</{D} parameter>\n'
        f'<{D} parameter name="n" string="false">1.5</{D} parameter>\n'
        f'<{D} parameter name="o" string="false">["\u4e2d"]</{D} parameter>\n'
        f"</{D} invoke>\n</{D} calls>{EOS}",
    ),
    "a reminder has its marker, and the header comes before it": (
        [user("Hi"), {"role": "latest_reminder", "content": "It is Monday."}, assistant("Yo")],
        PromptOptions(thinking=False, add_generation_prompt=False),
        f"{BOS}{U}Hi{A}</think>{REMINDER}It is Monday.Yo{EOS}",
    ),
    "a task marker stands in place of the header": (
        [user("Hi", task="title")],
        PromptOptions(),
        f"{BOS}{S}{HIGH}{U}Hi<\uff5ctitle\uff5c>",
    ),
    "the action marker comes behind the header": (
        [user("Hi", task="action")],
        PromptOptions(),
        f"{BOS}{S}{HIGH}{U}Hi{A}<think><\uff5caction\uff5c>",
    ),
    "the answer to a task has no reasoning, and users are not merged into a task": (
        [user("Hi", task="query"), assistant("q", reasoning_content="r"), user("a"), user("b")],
        PromptOptions(drop_thinking=False),
        f"{BOS}{S}{HIGH}{U}Hi<\uff5cquery\uff5c>q{EOS}{U}a\n\nb{A}<think>",
    ),
    "no generation prompt": (
        [user("Hi")],
        PromptOptions(thinking=False, add_generation_prompt=False),
        f"{BOS}{U}Hi",
    ),
    "an assistant message at the end is answered": (
        [user("Hi"), assistant("Ho")],
        PLAIN,
        f"{BOS}{U}Hi{A}</think>Ho{EOS}{A}</think>",
    ),
    "an assistant message at the end is continued": (
        [user("Hi"), assistant("Ho")],
        PromptOptions(thinking=False, continue_final_message=True),
        f"{BOS}{U}Hi{A}</think>Ho",
    ),
    "reasoning without an answer is continued": (
        [user("Hi"), assistant(None, reasoning_content="Hmm")],
        PromptOptions(continue_final_message=True),
        f"{BOS}{S}{HIGH}{U}Hi{A}<think>Hmm",
    ),
    "the end marker is left off on request": (
        [assistant("Ho", wo_eos=True), user("Hi")],
        PLAIN,
        f"{BOS}Ho{U}Hi{A}</think>",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_prompt_is_the_golden_one(name: str) -> None:
    messages, options, expected = GOLDEN[name]
    assert to_text(render(messages, options=options)) == expected


@pytest.mark.parametrize(
    ("effort", "number"),
    [(None, 75), ("low", 50), ("high", 75), ("max", 100), (1, 1), (37, 37), (100, 100)],
)
def test_effort_is_written_as_its_number(effort: int | str | None, number: int) -> None:
    prompt = to_text(render([user("Hi")], options=PromptOptions(reasoning_effort=effort)))
    assert prompt == f"{BOS}{S}{HIGH.replace('75', str(number))}{U}Hi{A}<think>"


def test_effort_is_written_once_at_the_start() -> None:
    messages = [user("1"), assistant("2"), system("3"), user("4")]
    assert to_text(render(messages)).count("Reasoning Effort") == 1


@pytest.mark.parametrize("effort", [0, 101, True, 75.0, "medium", "xhigh", "75", [75]])
def test_other_efforts_are_refused_by_name(effort: Any) -> None:
    with pytest.raises(RequestError, match="low, high, max, and none"):
        render([user("Hi")], options=PromptOptions(reasoning_effort=effort))


def test_effort_none_turns_thinking_off() -> None:
    none = render([user("Hi")], options=PromptOptions(reasoning_effort="none"))
    assert none == render([user("Hi")], options=PLAIN)


def test_effort_without_thinking_is_refused() -> None:
    with pytest.raises(RequestError, match="thinking is off"):
        render([user("Hi")], options=PromptOptions(thinking=False, reasoning_effort="max"))


PROMPT = f"Call with <{D} calls> after </think>:\n{{tool_schemas}}\nEnd."
WITH_TOOLS = PromptOptions(thinking=False, tools_prompt=PROMPT)
SECTION = (
    f"Call with <{D} calls> after </think>:\n"
    '{"name": "f", "description": "d\u00e9crit"}\n{"name": "g", "description": "d\u00e9crit"}\nEnd.'
)


def test_tools_go_into_the_first_system_message() -> None:
    prompt = render(
        [system("Be brief."), user("Hi")], tools=[tool("f"), tool("g")], options=WITH_TOOLS
    )
    assert to_text(prompt) == f"{BOS}{S}Be brief.\n\n{SECTION}{U}Hi{A}</think>"


def test_tools_without_a_system_message_make_one() -> None:
    prompt = render([user("Hi")], tools=[tool("f"), tool("g")], options=WITH_TOOLS)
    assert to_text(prompt) == f"{BOS}{S}\n\n{SECTION}{U}Hi{A}</think>"


def test_tools_carried_by_a_message_are_written_where_it_stands() -> None:
    messages = [user("Hi"), {"role": "system", "tools": [tool("f"), tool("g")]}]
    prompt = to_text(render(messages, options=WITH_TOOLS))
    assert prompt == f"{BOS}{U}Hi{S}\n\n{SECTION}{A}</think>"


def test_a_response_format_comes_after_the_tools() -> None:
    messages = [system("Be brief.", tools=[tool("f"), tool("g")], response_format={"type": "o"})]
    prompt = to_text(render(messages, options=WITH_TOOLS))
    assert prompt.startswith(f"{BOS}{S}Be brief.\n\n{SECTION}\n\n## Response Format\n\n")
    assert prompt.endswith(f'\n{{"type": "o"}}{A}</think>')


def test_tools_keep_all_reasoning() -> None:
    messages = [user("1"), assistant("2", reasoning_content="r"), user("3")]
    prompt = to_text(render(messages, tools=[tool("f")]))
    assert prompt.endswith(f"{U}1{A}<think>r</think>2{EOS}{U}3{A}<think>")


def test_our_tools_prompt_shows_the_released_tags() -> None:
    prompt = to_text(render([user("Hi")], tools=[tool("f")]))
    for tag in (
        f"<{D} calls>",
        f'<{D} invoke name="FUNCTION">',
        f'<{D} parameter name="NAME" string="true|false">',
        f"</{D} parameter>",
        f"</{D} invoke>",
        f"</{D} calls>",
    ):
        assert tag in prompt


@pytest.mark.parametrize("prompt", ["no place", "{tool_schemas} {tool_schemas}"])
def test_a_tools_prompt_needs_one_place_for_the_schemas(prompt: str) -> None:
    with pytest.raises(CheckpointError, match="exactly once"):
        render([user("Hi")], tools=[tool("f")], options=PromptOptions(tools_prompt=prompt))


def test_tags_of_the_tools_prompt_and_of_past_calls_are_control_tokens() -> None:
    prompt = render([user("Hi"), ONE_CALL], tools=[tool("f")], options=WITH_TOOLS)
    assert prompt.count(Marker(DSML)) == 1 + 4
    assert Marker("</think>") in prompt


@pytest.mark.parametrize(
    "message",
    [
        user("x", task="poem"),
        assistant("x", task="title"),
        user("x", tools=[tool("f")]),
        user("x", response_format={}),
    ],
)
def test_what_a_message_cannot_carry_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        render([system("s"), message])


def test_only_an_assistant_message_can_be_continued() -> None:
    with pytest.raises(RequestError, match="continue_final_message"):
        render([user("Hi")], options=PromptOptions(continue_final_message=True))


MARKERS = [*REQUIRED_MARKERS, *(marker for _, marker in TASK_MARKERS), REMINDER, CALLS_OPEN]
hostile = st.lists(st.sampled_from([*MARKERS, "<", "\uff5cUser\uff5c>", "think>", "a", "\n"])).map(
    "".join
)


@settings(max_examples=40)
@given(texts=st.lists(hostile, min_size=12, max_size=12), thinking=st.booleans())
def test_text_of_a_client_never_becomes_a_marker(texts: list[str], thinking: bool) -> None:
    def conversation(texts: list[str]) -> list[Any]:
        messages = [
            system(texts[0]),
            user(texts[1]),
            assistant(
                texts[2],
                reasoning_content=texts[3],
                tool_calls=[call("a", texts[4] or "f", {texts[5]: texts[6], "n": [texts[7]]})],
            ),
            result(texts[8], "a"),
            {"role": "latest_reminder", "content": texts[9]},
        ]
        tools = [{"type": "function", "function": {"name": texts[10], "x": {texts[11]: 1}}}]
        return render(messages, tools=tools, options=PromptOptions(thinking=thinking))

    def markers(segments: list[Any]) -> list[Marker]:
        return [segment for segment in segments if isinstance(segment, Marker)]

    prompt = conversation(texts)
    assert markers(prompt) == markers(conversation(["x"] * 12))
    everything = "".join(segment.text for segment in prompt if isinstance(segment, Text))
    assert all(text in everything for text in (texts[0], texts[1], texts[8], texts[9]))
