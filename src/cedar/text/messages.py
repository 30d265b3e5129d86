"""Chat messages as clients send them, checked and brought into one shape.

Lives here: what a message, a tool call and a tool definition may look like, in the form of OpenAI's
chat completions API.  Does not live here: how they are written into a prompt
(:mod:`cedar.text.deepseek_v41`, :mod:`cedar.text.chat_template`).  Called by the chat formats.

Every check that a hostile request could fail is made here, so that later code can rely on it: known
roles, text that has a UTF-8 form, JSON of bounded depth.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cedar.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
MAX_JSON_DEPTH = 64


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an assistant message made.

    Attributes:
        id: the call's id, None where the client sent none.
        name: the function's name.
        arguments: the parsed JSON object.
    """

    id: str | None
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One checked message.

    Attributes:
        role: one of :data:`ROLES`.
        parts: the text parts of the content; empty where the content is null.
        reasoning: the reasoning text of an assistant message.
        tool_calls: the calls of an assistant message.
        tool_call_id: the call that a tool message answers, None where the client sent none.
        task: name of a task marker that follows a user message, None for ordinary turns.
        tools: tool definitions carried by this message.
        response_format: the JSON schema that answers must follow, None where there is none.
        without_end: leave the end marker of an assistant message off, so that it can be continued.
    """

    role: str
    parts: tuple[str, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    task: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Any = None
    without_end: bool = False

    def text(self, separator: str = "\n\n") -> str:
        """Returns the text parts as one string."""
        return separator.join(self.parts)


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Checks a conversation.

    Args:
        messages: OpenAI-style messages.  Beyond OpenAI's keys, ``reasoning_content`` (or
            ``reasoning``), ``task``, ``tools``, ``response_format`` and ``wo_eos`` are read.

    Raises:
        RequestError: names the message and the key that cannot be honoured.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(
            f"messages is a {_kind(messages)}; send a list of messages", param="messages"
        )
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def require_final_assistant(last: Message) -> None:
    """Checks that the last message of a conversation is one that can be continued.

    Raises:
        RequestError: it is not an assistant's.
    """
    if last.role != "assistant":
        raise RequestError(
            "continue_final_message needs an assistant message at the end; the last one is a "
            f"{last.role} message",
            param="continue_final_message",
        )


def _parse_message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(
            f'{where} is a {_kind(message)}; send an object like {{"role": "user", "content": '
            '"..."}',
            param=where,
        )
    check_json(message, where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {reprlib.repr(role)}; it must be one of {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    reasoning = _text_or_none(message, "reasoning_content", where)
    if reasoning is None:
        reasoning = _text_or_none(message, "reasoning", where)
    return Message(
        role=role,
        parts=_parse_content(message.get("content"), role, where),
        reasoning=reasoning or "",
        tool_calls=_parse_tool_calls(message, role, where),
        tool_call_id=_text_or_none(message, "tool_call_id", where),
        task=_text_or_none(message, "task", where),
        tools=parse_tools(message.get("tools"), f"{where}.tools"),
        response_format=message.get("response_format"),
        without_end=message.get("wo_eos") is True,
    )


def _parse_content(content: Any, role: str, where: str) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    if content is None and role in ("assistant", "system"):  # calls or tools may be all there is
        return ()
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content is {_kind(content)}; a {role} message needs a string or a list of "
            "text parts",
            param=f"{where}.content",
        )
    parts: list[str] = []
    for i, part in enumerate(content):
        place = f"{where}.content[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if kind != "text":
            raise RequestError(
                f"{place} is of type {reprlib.repr(kind)}; only text parts "
                '({"type": "text", "text": "..."}) are supported, this model reads no images, '
                "audio or files",
                param=place,
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{place}.text must be a string", param=f"{place}.text")
        parts.append(part["text"])
    return tuple(parts)


def _parse_tool_calls(message: Mapping[str, Any], role: str, where: str) -> tuple[ToolCall, ...]:
    calls = message.get("tool_calls")
    if calls is None:
        return ()
    where = f"{where}.tool_calls"
    if role != "assistant":
        raise RequestError(
            f"{where} belongs to a {role} message; only an assistant's can call tools", param=where
        )
    if not isinstance(calls, list):
        raise RequestError(f"{where} is {_kind(calls)}; it must be a list", param=where)
    return tuple(_parse_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls))


def _parse_tool_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name must be a non-empty string", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            # Clients send an empty string for a call without arguments.
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where}.function.arguments is not valid JSON: {error}",
                param=f"{where}.function.arguments",
            ) from error
    if not isinstance(arguments, Mapping):
        raise RequestError(
            f"{where}.function.arguments is {_kind(arguments)}; it must be a JSON object, or the "
            "text of one",
            param=f"{where}.function.arguments",
        )
    check_json(arguments, f"{where}.function.arguments")
    return ToolCall(_text_or_none(call, "id", where), name, arguments)


def parse_tools(tools: Any, where: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Checks tool definitions and returns each one's ``function`` object.

    Raises:
        RequestError: a definition is not ``{"type": "function", "function": {"name": ...}}``.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestError(f"{where} is {_kind(tools)}; it must be a list", param=where)
    check_json(list(tools), where)
    functions: list[Mapping[str, Any]] = []
    for i, tool in enumerate(tools):
        is_function = isinstance(tool, Mapping) and tool.get("type", "function") == "function"
        function = tool.get("function") if is_function else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'{where}[{i}] must be {{"type": "function", "function": {{"name": "...", ...}}}}',
                param=f"{where}[{i}]",
            )
        functions.append(function)
    return tuple(functions)


def check_json(value: Any, where: str, depth: int = 0) -> None:
    """Checks that a client's value can be written as JSON and encoded as UTF-8.

    Raises:
        RequestError: a lone surrogate, nesting deeper than :data:`MAX_JSON_DEPTH` levels, or a
            value that is no JSON.
    """
    if depth > MAX_JSON_DEPTH:
        raise RequestError(
            f"{where.split('.')[0]} is nested deeper than {MAX_JSON_DEPTH} levels", param=where
        )
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{where} holds half of a surrogate pair at character {error.start}, which no "
                "UTF-8 text can hold",
                param=where,
            ) from error
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise RequestError(
                    f"{where} has the key {reprlib.repr(key)}; keys are strings", param=where
                )
            check_json(key, where, depth)
            check_json(entry, where if depth else f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            check_json(entry, where, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{where} holds {value}, which JSON cannot express", param=where)
    elif value is not None and not isinstance(value, int | float):
        raise RequestError(f"{where} holds a {_kind(value)}, which is no JSON value", param=where)


def _text_or_none(mapping: Mapping[str, Any], key: str, where: str) -> str | None:
    value = mapping.get(key)
    if value is not None and not isinstance(value, str):
        raise RequestError(
            f"{where}.{key} is {_kind(value)}; it must be a string", param=f"{where}.{key}"
        )
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
