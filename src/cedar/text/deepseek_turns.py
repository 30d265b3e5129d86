"""Turns of a DeepSeek-V4.1 prompt: messages brought into the roles and the order it knows.

Lives here: tools put into the first system message, tool results and neighbouring user messages
joined into user turns.  Does not live here: how a turn is written (:mod:`cedar.text.deepseek_v41`,
the only caller).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cedar.errors import RequestError
from cedar.text.deepseek_markers import TASK_MARKERS
from cedar.text.messages import Message, parse_messages, parse_tools


@dataclass(slots=True)
class Turn:
    """One turn: a message of another role, or all that stands between two of those.

    Attributes:
        message: what the turn was made of; for a user turn only its role and task count.
        blocks: the pieces of a user turn.
    """

    message: Message
    blocks: list[Block] = field(default_factory=list)

    @property
    def role(self) -> str:
        """``system``, ``user``, ``assistant`` or ``latest_reminder``."""
        return self.message.role


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of a user turn: the user's text, or the result of a call."""

    text: str
    is_result: bool
    call_id: str | None = None


def build_turns(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[Turn]:
    """Checks a conversation and returns its turns.

    Args:
        messages: OpenAI-style messages.
        tools: OpenAI-style tool definitions; they go into the first message, or into an empty
            system message before it where it is none.

    Raises:
        RequestError: a message or a tool cannot be honoured.
    """
    known = [_as_known(m, f"messages[{i}]") for i, m in enumerate(parse_messages(messages))]
    return _merge(_carry_tools(known, parse_tools(tools)))


def _as_known(message: Message, where: str) -> Message:
    """Brings a message into what the format knows: no developers, and known tasks of users."""
    tasks = dict(TASK_MARKERS)
    if message.task is not None and (message.task not in tasks or message.role != "user"):
        raise RequestError(
            f"{where}, a {message.role} message, has the task {reprlib.repr(message.task)}; a user "
            f"message may have one of {', '.join(tasks)}",
            param=f"{where}.task",
        )
    if message.role not in ("system", "developer") and (
        message.tools or message.response_format is not None
    ):
        raise RequestError(
            f"{where}, a {message.role} message, carries tools or a response_format; only a system "
            "message may",
            param=where,
        )
    # OpenAI renamed the system role; the release's prompts have one kind of instruction only.
    return replace(message, role="system") if message.role == "developer" else message


def _carry_tools(messages: list[Message], tools: tuple[Mapping[str, Any], ...]) -> list[Message]:
    if not tools:
        return messages
    if messages[0].role != "system":
        messages = [Message(role="system"), *messages]
    return [replace(messages[0], tools=(*messages[0].tools, *tools)), *messages[1:]]


def _merge(messages: list[Message]) -> list[Turn]:
    """Turns tool messages into blocks of user turns and joins neighbouring user turns."""
    turns: list[Turn] = []
    for message in messages:
        if message.role not in ("user", "tool"):
            turns.append(Turn(message))
            continue
        if not turns or turns[-1].role != "user" or turns[-1].message.task:
            turns.append(Turn(Message(role="user")))
        turn = turns[-1]
        if message.role == "tool":
            turn.blocks.append(Block(message.text(), True, message.tool_call_id))
        else:
            turn.blocks += [Block(part, False) for part in message.parts]
            turn.message = replace(turn.message, task=message.task)
    places: dict[str, int] = {}
    for turn in turns:
        if turn.message.tool_calls:
            ids = [call.id for call in turn.message.tool_calls]
            places = {call_id: i for i, call_id in enumerate(ids) if call_id}
        elif turn.role == "user":
            _order_results(turn.blocks, places)
    return turns


def _order_results(blocks: list[Block], places: Mapping[str, int]) -> None:
    """Puts the results of one turn into the order of the calls; unknown ids come first."""
    slots = [i for i, block in enumerate(blocks) if block.is_result]
    results = sorted(
        (blocks[i] for i in slots), key=lambda block: places.get(block.call_id or "", 0)
    )
    for slot, result in zip(slots, results, strict=True):
        blocks[slot] = result
