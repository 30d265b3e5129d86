"""Tool definitions and past tool calls as DeepSeek-V4.1 prompts hold them.

Lives here: the section of a system message that lists the tools, and the block that an assistant
message ends with when it called some.  Does not live here: reading such a block from the model's
output (:mod:`cedar.text.tool_calls`).  Called by :mod:`cedar.text.deepseek_v41`.

The instructions are worded by us; the release words its own.  A model directory replaces ours with
``encoding/tools_prompt.txt`` (docs/chat.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cedar.errors import CheckpointError
from cedar.text.deepseek_markers import (
    CALLS_CLOSE,
    CALLS_NAME,
    CALLS_OPEN,
    DSML,
    INVOKE_CLOSE,
    INVOKE_NAME,
    PARAMETER_CLOSE,
    PARAMETER_NAME,
    THINK_CLOSE,
    THINK_OPEN,
)
from cedar.text.messages import ToolCall
from cedar.text.segments import Marker, Segment, Text, marker_pattern, split_at_markers

SCHEMAS_FIELD = "{tool_schemas}"
TOOLS_PROMPT = f"""## Tools

You can call the functions that are listed below. To call some, end your answer with one block of \
this form, after a blank line:

{CALLS_OPEN}
<{DSML}{INVOKE_NAME} name="FUNCTION">
<{DSML}{PARAMETER_NAME} name="NAME" string="true|false">VALUE{PARAMETER_CLOSE}
{INVOKE_CLOSE}
{CALLS_CLOSE}

Write one invoke per call and one parameter per argument. With string="true" the value is plain \
text, written as it is; with string="false" it is JSON (a number, boolean, null, array or object).

If you think before you answer, finish thinking with {THINK_CLOSE} before the block begins.

The functions, one JSON schema per line:

{SCHEMAS_FIELD}

Call only these functions, with arguments that their schemas allow."""


def tools_section(tools: Sequence[Any], prompt: str = TOOLS_PROMPT) -> list[Segment]:
    """Writes the instructions, whose tags are control tokens, around the schemas, which are text.

    Args:
        tools: the ``function`` objects of the tool definitions.
        prompt: the instructions, with ``{tool_schemas}`` where the schemas go.

    Raises:
        CheckpointError: ``{tool_schemas}`` does not occur exactly once.
    """
    count = prompt.count(SCHEMAS_FIELD)
    if count != 1:
        raise CheckpointError(
            f"the tools prompt contains {SCHEMAS_FIELD} {count} times; it must do so exactly once, "
            "where the schemas of the tools go"
        )
    before, after = prompt.split(SCHEMAS_FIELD)
    pattern = marker_pattern((DSML, THINK_OPEN, THINK_CLOSE))
    schemas = Text("\n".join(to_json(tool) for tool in tools))
    return [*split_at_markers(before, pattern), schemas, *split_at_markers(after, pattern)]


def calls_block(calls: Sequence[ToolCall]) -> list[Segment]:
    """Writes the calls of one assistant message, with the blank line that comes before them."""
    segments: list[Segment] = [Text("\n\n"), *_tag("<", f"{CALLS_NAME}>\n")]
    for i, call in enumerate(calls):
        segments += _tag("\n<" if i else "<", f'{INVOKE_NAME} name="{call.name}">\n')
        for j, (name, value) in enumerate(call.arguments.items()):
            is_text = isinstance(value, str)
            attributes = f' name="{name}" string="{"true" if is_text else "false"}">'
            segments += _tag("\n<" if j else "<", PARAMETER_NAME + attributes)
            segments.append(Text(value if is_text else to_json(value)))
            segments += _tag("</", f"{PARAMETER_NAME}>")
        segments += _tag("\n</", f"{INVOKE_NAME}>")
    return [*segments, *_tag("\n</", f"{CALLS_NAME}>")]


def to_json(value: Any) -> str:
    """Returns JSON as the model was trained on it: one line, characters not escaped to ASCII."""
    return json.dumps(value, ensure_ascii=False)


def _tag(before: str, after: str) -> list[Segment]:
    return [Text(before), Marker(DSML), Text(after)]
