"""The prompt format of DeepSeek-V4.1.

Lives here: how a conversation is written for models of this family, which ship no Jinja template.
Does not live here: reading the model's output (:mod:`cedar.text.reasoning`,
:mod:`cedar.text.tool_calls`) and the choice of a format (:mod:`cedar.text.chat_template`, which
calls this).

One conversation with one tool call, thinking on, a line per message::

    <BOS><System>Reasoning Effort: 75 (...)\\n\\nBe brief.\\n\\n## Tools ...
    <User>Rain tomorrow?<Assistant><think>
    I look it up.</think>\\n\\n<DSML calls> ... </DSML calls><EOS>
    <User><tool_result>{"rain": true}</tool_result><Assistant><think>

Source: the rules of the release's ``encoding/encoding.py``.  Its instructions for tools and
response formats are worded anew (docs/chat.md).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cedar.errors import RequestError
from cedar.text.deepseek_markers import (
    ASSISTANT,
    BOS,
    EOS,
    LATEST_REMINDER,
    SYSTEM,
    TASK_MARKERS,
    THINK_CLOSE,
    THINK_OPEN,
    USER,
)
from cedar.text.deepseek_turns import Block, Turn, build_turns
from cedar.text.dsml import TOOLS_PROMPT, calls_block, to_json, tools_section
from cedar.text.messages import Message, require_final_assistant
from cedar.text.segments import Marker, Segment, Text, join_texts

EFFORTS: Mapping[str, int] = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = EFFORTS["high"]
RESPONSE_FORMAT_PROMPT = """## Response Format

Answer with JSON that follows this schema, and with nothing else:
"""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How a prompt is written.

    Attributes:
        thinking: let the model reason before it answers.
        reasoning_effort: 1 to 100, ``low`` (50), ``high`` (75), ``max`` (100), or ``none``, which
            turns thinking off; None is ``high`` where thinking is on.
        drop_thinking: leave out the reasoning of turns before the last user message; without effect
            where a message carries tools, which keep all reasoning.
        add_generation_prompt: end with the header of the assistant's next turn.
        continue_final_message: leave the last message, an assistant's, open to be continued.
        tools_prompt: instructions for tool calls, with ``{tool_schemas}`` where the schemas go.
    """

    thinking: bool = True
    reasoning_effort: int | str | None = None
    drop_thinking: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools_prompt: str = TOOLS_PROMPT

    @property
    def effort(self) -> int | None:
        """The effort written into the prompt; None where thinking is off.

        Raises:
            RequestError: the effort is none of the allowed values, or thinking is off.
        """
        given = self.reasoning_effort
        if given == "none" or (given is None and not self.thinking):
            return None
        if given is None:
            return DEFAULT_EFFORT
        value = EFFORTS.get(given) if isinstance(given, str) else given
        if type(value) is not int or not 1 <= value <= 100:  # a bool is an int, but no effort
            raise RequestError(
                f"reasoning_effort is {reprlib.repr(given)}; allowed are whole numbers from 1 to "
                f"100, {', '.join(EFFORTS)}, and none",
                param="reasoning_effort",
            )
        if not self.thinking:
            raise RequestError(
                f"reasoning_effort is {given!r} but thinking is off; leave one of the two out",
                param="reasoning_effort",
            )
        return value


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: PromptOptions | None = None,
) -> list[Segment]:
    """Writes a conversation as a prompt that begins with the begin-of-sentence marker.

    Args:
        messages: OpenAI-style messages; :func:`cedar.text.messages.parse_messages` lists the keys.
        tools: OpenAI-style tool definitions.
        options: thinking, effort and how the prompt ends; None takes every default.

    Raises:
        RequestError: a message, a tool or an option cannot be honoured.
        CheckpointError: the tools prompt has no place for the schemas.
    """
    options = options or PromptOptions()
    turns = build_turns(messages, tools)
    if options.continue_final_message:
        last = turns[-1]
        require_final_assistant(last.message)
        last.message = replace(last.message, without_end=True)
    return _Prompt(turns, options).write()


class _Prompt:
    """Writes the turns of one conversation."""

    def __init__(self, turns: list[Turn], options: PromptOptions) -> None:
        self._turns = turns
        self._options = options
        self._effort = options.effort
        self._thinking = self._effort is not None
        has_tools = any(turn.message.tools for turn in turns)
        self._keep_all = not options.drop_thinking or has_tools
        self._last_user = max((i for i in range(len(turns)) if self._is_user(i)), default=-1)
        self._segments: list[Segment] = [Marker(BOS)]

    def write(self) -> list[Segment]:
        if self._thinking:
            self._marker(SYSTEM)
            self._text(
                f"Reasoning Effort: {self._effort} (range 1-100, the higher the value, the more "
                "thorough the reasoning)\n\n"
            )
        for i, turn in enumerate(self._turns):
            if turn.role == "system":
                if i or not self._thinking:
                    self._marker(SYSTEM)
                self._system(turn.message)
            elif turn.role == "user":
                self._marker(USER)
                self._text("\n\n".join(_block_text(block) for block in turn.blocks))
            elif turn.role == "latest_reminder":
                self._marker(LATEST_REMINDER)
                self._text(turn.message.text())
            else:
                self._assistant(i, turn.message)
            self._header(i)
        return join_texts(self._segments)

    def _is_user(self, i: int) -> bool:
        """Whether turn ``i`` is a user's, or a system message in mid-conversation, which counts."""
        return self._turns[i].role == "user" or (i > 0 and self._turns[i].role == "system")

    def _thinks(self, i: int) -> bool:
        return self._thinking and (self._keep_all or i >= self._last_user)

    def _header(self, i: int) -> None:
        """Opens the assistant's turn after turn ``i``, where one follows."""
        turn, is_last = self._turns[i], i == len(self._turns) - 1
        if is_last:
            if not self._options.add_generation_prompt or self._options.continue_final_message:
                return
        elif self._turns[i + 1].role not in ("assistant", "latest_reminder"):
            return
        task = turn.message.task
        # A conversation may end with any message but a reminder; the model then answers it.
        if task == "action" or (
            task is None and (self._is_user(i) or (is_last and turn.role != "latest_reminder"))
        ):
            opens = self._thinks(i) or (task is not None and self._thinking)
            self._marker(ASSISTANT)
            self._marker(THINK_OPEN if opens else THINK_CLOSE)
        if task is not None:
            self._marker(dict(TASK_MARKERS)[task])

    def _system(self, message: Message) -> None:
        self._text(message.text())
        if message.tools:
            self._text("\n\n")
            self._segments += tools_section(message.tools, self._options.tools_prompt)
        if message.response_format is not None:
            self._text("\n\n" + RESPONSE_FORMAT_PROMPT + to_json(message.response_format))

    def _assistant(self, i: int, message: Message) -> None:
        is_task_answer = i > 0 and self._turns[i - 1].message.task is not None
        if self._thinks(i) and not is_task_answer:
            self._text(message.reasoning)
            is_continued = self._options.continue_final_message and i == len(self._turns) - 1
            has_answer = bool(message.text() or message.tool_calls)
            # Without an answer yet, it is the reasoning that is continued.
            if has_answer or not (is_continued and message.reasoning):
                self._marker(THINK_CLOSE)
        self._text(message.text())
        if message.tool_calls:
            self._segments += calls_block(message.tool_calls)
        if not message.without_end:
            self._marker(EOS)

    def _text(self, text: str) -> None:
        self._segments.append(Text(text))

    def _marker(self, text: str) -> None:
        self._segments.append(Marker(text))


def _block_text(block: Block) -> str:
    return f"<tool_result>{block.text}</tool_result>" if block.is_result else block.text
