"""Pins the tool-call parser: what is a call and what stays text, however the text is cut."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedar.text.deepseek_v41 import PromptOptions, render
from cedar.text.reasoning import ReasoningSplitter
from cedar.text.segments import to_text
from cedar.text.tool_calls import ContentDelta, Event, ToolCallDelta, ToolCallParser, new_call_id

D = "\uff5cDSML\uff5c"
OPEN, CLOSE = f"<{D} calls>", f"</{D} calls>"


def invoke(name: str, *parameters: str) -> str:
    return "\n".join([f'<{D} invoke name="{name}">', *parameters, f"</{D} invoke>"])


def parameter(name: str, value: str, string: str = "true") -> str:
    return f'<{D} parameter name="{name}" string="{string}">{value}</{D} parameter>'


def block(*invokes: str) -> str:
    return "\n".join([f"\n\n{OPEN}", *invokes, CLOSE])


def events_of(pieces: list[str]) -> list[Event]:
    ids = count()
    parser = ToolCallParser(lambda: f"id{next(ids)}")
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def joined(pieces: list[str]) -> list[Any]:
    """Content pieces joined; calls as they are."""
    result: list[Any] = []
    for event in events_of(pieces):
        if isinstance(event, ContentDelta):
            assert event.text
            if result and isinstance(result[-1], str):
                result[-1] += event.text
            else:
                result.append(event.text)
        else:
            result.append((event.index, event.id, event.name, event.arguments))
    return result


WEATHER = invoke("weather", parameter("city", "Oslo"), parameter("days", "3", "false"))
CALLS = {
    "one call": (block(WEATHER), [(0, "id0", "weather", '{"city": "Oslo", "days": 3}')]),
    "text before": (
        "I look." + block(WEATHER),
        ["I look.", (0, "id0", "weather", '{"city": "Oslo", "days": 3}')],
    ),
    "only one blank line is taken away": (
        "I look.\n" + block(invoke("f")),
        ["I look.\n", (0, "id0", "f", "{}")],
    ),
    "no blank line": (f"a\n{OPEN}{invoke('f')}{CLOSE}", ["a\n", (0, "id0", "f", "{}")]),
    "no parameters": (block(f'<{D} invoke name="f">\n\n</{D} invoke>'), [(0, "id0", "f", "{}")]),
    "two calls": (
        block(invoke("f"), invoke("g", parameter("x", "1", "false"))),
        [(0, "id0", "f", "{}"), (1, "id1", "g", '{"x": 1}')],
    ),
    "two blocks": (
        block(invoke("f")) + " and" + block(invoke("g")) + "end",
        [(0, "id0", "f", "{}"), " and", (1, "id1", "g", "{}"), "end"],
    ),
    "strings are escaped": (
        block(invoke("f", parameter("x", 'a "b"\n\\c\u00e9</x>'))),
        [(0, "id0", "f", '{"x": "a \\"b\\"\\n\\\\c\u00e9</x>"}')],
    ),
    "an empty string": (
        block(invoke("f", parameter("x", ""))),
        [(0, "id0", "f", '{"x": ""}')],
    ),
    "a string keeps its white space": (
        block(invoke("f", parameter("x", "\n  y\n"))),
        [(0, "id0", "f", '{"x": "\\n  y\\n"}')],
    ),
    "other values stand as they were written": (
        block(invoke("f", parameter("x", '[1.0,2e3, {"a":null}]', "false"))),
        [(0, "id0", "f", '{"x": [1.0,2e3, {"a":null}]}')],
    ),
    "a value that looks like a tag": (
        block(invoke("f", parameter("x", f"{OPEN}{CLOSE}</{D} invoke>"))),
        [(0, "id0", "f", f'{{"x": "{OPEN}{CLOSE}</{D} invoke>"}}')],
    ),
    "a JSON object in place of parameters": (
        block(invoke("f", '{"x": [1, "}"]}')),
        [(0, "id0", "f", '{"x": [1, "}"]}')],
    ),
    "no line breaks at all": (
        f"{OPEN}{invoke('f', parameter('x', 'y'))}{CLOSE}".replace("\n", ""),
        [(0, "id0", "f", '{"x": "y"}')],
    ),
    "a block inside a broken one": (
        f"{OPEN} or {OPEN}\n{invoke('f')}\n{CLOSE}",
        [f"{OPEN} or ", (0, "id0", "f", "{}")],
    ),
}

NO_CALLS = {
    "plain text": "Just text.\n\n",
    "almost a tag": f"a\n\n<{D} call >\n",
    "cut inside the opening tag": f"a\n\n<{D} cal",
    "cut inside a call": f"a\n\n{OPEN}\n<{D} invoke name=",
    "cut inside a value": block(WEATHER)[:-60],
    "cut before the end of the block": block(WEATHER)[:-1],
    "an empty block": block(),
    "text in the block": block("Well,", WEATHER),
    "text in a call": block(invoke("f", "the file")),
    "text between parameters": block(invoke("f", parameter("x", "1"), "and", parameter("y", "2"))),
    "a call without a name": block(invoke("")),
    "an unknown tag": block(f"<{D} think>x</{D} think>"),
    "a parameter without its flag": block(
        invoke("f", f'<{D} parameter name="x">1</{D} parameter>')
    ),
    "an unknown flag": block(invoke("f", parameter("x", "1", "maybe"))),
    "a parameter outside a call": block(parameter("x", "1")),
    "a parameter twice": block(invoke("f", parameter("x", "1"), parameter("x", "2"))),
    "a value that is no JSON": block(invoke("f", parameter("x", "True", "false"))),
    "a value that JSON has no word for": block(invoke("f", parameter("x", "NaN", "false"))),
    "a value that smuggles in another": block(invoke("f", parameter("x", '1, "y": 2', "false"))),
    "an object that is broken": block(invoke("f", '{"x": 1')),
    "an object and more": block(invoke("f", "{} {}")),
    "a deeply nested value": block(invoke("f", parameter("x", "[" * 10**5, "false"))),
    "a good call before a bad one": block(WEATHER, invoke("f", "oops")),
    "tags without their space": block(WEATHER).replace(f"{D} ", D),
    "the previous generation's block": block(WEATHER)
    .replace(f"{D} calls", f"{D}tool_calls")
    .replace(f"{D} ", D),
    "the previous generation's tags inside": block(WEATHER).replace(f"{D} invoke", f"{D}invoke"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_read_from_the_whole_and_from_single_characters(name: str) -> None:
    text, expected = CALLS[name]
    assert joined([text]) == expected
    assert joined(list(text)) == expected


@pytest.mark.parametrize("name", NO_CALLS)
def test_what_is_no_call_comes_back_unchanged(name: str) -> None:
    text = NO_CALLS[name]
    assert joined([text]) == [text]
    assert joined([text[i : i + 7] for i in range(0, len(text), 7)]) == [text]


def test_content_leaves_at_once_and_a_call_when_its_block_is_closed() -> None:
    parser = ToolCallParser(lambda: "id")
    assert parser.push("I look.\n") == [ContentDelta("I look.")]
    assert parser.push("a < b") == [ContentDelta("\na < b")]
    assert parser.push(block(invoke("f"))[:-1]) == []
    assert parser.push(">!") == [ToolCallDelta(0, "id", "f", "{}"), ContentDelta("!")]
    assert parser.finish() == []


def test_a_malformed_block_leaves_as_soon_as_it_is_one() -> None:
    parser = ToolCallParser()
    assert parser.push(OPEN) == []
    assert parser.push(" are tags, ") == [ContentDelta(OPEN), ContentDelta(" are tags, ")]


def test_a_call_has_the_shape_of_openai() -> None:
    assert ToolCallDelta(1, "id", "f", "{}").to_openai() == {
        "index": 1,
        "id": "id",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }


def test_call_ids_differ() -> None:
    assert len({new_call_id() for _ in range(100)}) == 100


fragments = st.sampled_from(
    [
        OPEN, CLOSE, f'<{D} invoke name="f">', f"</{D} invoke>", parameter("x", "1", "false"),
        f'<{D} parameter name="y" string="true">', f"</{D} parameter>", block(invoke("g")),
        '{"a": 1}', "\n", "\n\n", "<", D, " ", "text", f"<{D}tool_calls>", "</think>",
    ]
)  # fmt: skip


@given(text=st.lists(fragments, max_size=10).map("".join), data=st.data())
def test_pieces_give_the_events_of_the_whole(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = joined([text])
    assert joined(pieces) == whole
    assert joined(list(text)) == whole
    for event in whole:
        if not isinstance(event, str):
            assert isinstance(json.loads(event[3]), dict)


names = st.text(st.characters(codec="utf-8", exclude_characters='"<>'), min_size=1)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner | st.text(st.characters(codec="utf-8")), max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=5,
) | st.text(st.characters(codec="utf-8"))
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1)


@settings(max_examples=30)
@given(content=st.sampled_from(["", "text", "a\n"]), calls=calls, step=st.integers(1, 9))
def test_calls_written_into_a_prompt_are_read_back(
    content: str, calls: list[tuple[str, dict[str, Any]]], step: int
) -> None:
    tool_calls = [
        {"id": None, "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in calls
    ]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls, "wo_eos": True}
    options = PromptOptions(thinking=False, add_generation_prompt=False)
    text = to_text(render([message], options=options)[1:])  # without the first marker
    events = joined([text[i : i + step] for i in range(0, len(text), step)])
    if content:
        assert events.pop(0) == content
    assert [(name, json.loads(arguments)) for _, _, name, arguments in events] == calls


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_a_block_that_ends_the_reasoning_is_read_and_nothing_leaks(size: int) -> None:
    text = "I need the weather." + block(WEATHER)
    splitter, parser = ReasoningSplitter(True), ToolCallParser(lambda: "id")
    reasoning, events = "", []
    for i in range(0, len(text), size):
        thought, answer = splitter.push(text[i : i + size])
        reasoning += thought
        events += parser.push(answer)
    thought, answer = splitter.finish()
    events += parser.push(answer) + parser.finish()
    assert reasoning + thought == "I need the weather."
    assert events == [ToolCallDelta(0, "id", "weather", '{"city": "Oslo", "days": 3}')]
