"""Chat templates in Jinja, rendered in a sandbox the way Hugging Face does.

Lives here: the environment, the names a template can use, and the way from its output to segments.
Does not live here: the choice of a format (:mod:`cedar.text.chat_template`, which calls this).

Source of names and filters: "Chat templates" in the documentation of Hugging Face Transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from cedar.errors import CheckpointError, RequestError, UsageError
from cedar.text.guarded_text import TextVault, on_real_text
from cedar.text.messages import (
    Message,
    check_json,
    parse_messages,
    parse_tools,
    require_final_assistant,
)
from cedar.text.segments import Segment, Text, join_texts, marker_pattern, split_at_markers

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.runtime import Context

_MAX_REASON = 500  # characters of a template's refusal, which may quote a whole message
_VAULT = "_text_vault"  # where the tojson filter finds the strings of this rendering
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", _VAULT})
# Filters that join text with something before they cut it; the others call methods of their text.
_TEXT_FILTERS = ("center", "indent", "title", "truncate", "wordcount", "wordwrap", "escape", "e")
_RENDER_ERRORS = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class JinjaTemplate:
    """The chat template of one model.

    Args:
        source: the template.
        origin: named in error messages.
        special_tokens: ``bos_token``, ``eos_token`` and so on, for the template to write.
        control_tokens: every control token of the vocabulary; where the template's own text
            spells one, it becomes a marker.

    Raises:
        CheckpointError: the template has a syntax error.
        UsageError: jinja2 is not installed.
    """

    chat_format = "jinja"
    writes_dsml = False

    def __init__(
        self,
        source: str,
        *,
        origin: str = "chat template",
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Iterable[str] = (),
    ) -> None:
        self._origin = origin
        self._special_tokens = dict(special_tokens or {})
        self._markers = marker_pattern(control_tokens)
        self._knows_developers = "developer" in source
        self._template = _compile(source, origin)
        eos = self._special_tokens.get("eos_token")
        self.end_markers: tuple[str, ...] = (eos,) if eos else ()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Renders a conversation; see :class:`cedar.text.chat_template.ChatTemplate`.

        Raises:
            RequestError: a message cannot be honoured, or the template refuses the conversation.
            CheckpointError: the template cuts text that a user's message was joined into.
        """
        parsed = parse_messages(messages)
        parse_tools(tools)
        extra = dict(chat_template_kwargs or {})
        check_json(extra, "chat_template_kwargs")
        if taken := _RESERVED.union(self._special_tokens).intersection(extra):
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}",
                param="chat_template_kwargs",
            )
        vault = TextVault()
        pairs = zip(messages, parsed, strict=True)
        variables = {
            **self._special_tokens,
            **{name: vault.guard(value) for name, value in extra.items()},
            "messages": [self._template_message(vault, *pair) for pair in pairs],
            "tools": vault.guard(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            _VAULT: vault,
        }
        pieces = vault.split(self._run(vault, variables))
        if continue_final_message:
            pieces = _cut_behind(pieces, parsed[-1])
        segments: list[Segment] = []
        for i, piece in enumerate(pieces):
            segments += [Text(piece)] if i % 2 else split_at_markers(piece, self._markers)
        return join_texts(segments)

    def _template_message(
        self, vault: TextVault, message: Mapping[str, Any], parsed: Message
    ) -> dict[str, Any]:
        shown = dict(message)
        if parsed.parts or message.get("content") is not None:
            shown["content"] = parsed.text("\n")
        if parsed.reasoning:
            shown["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            # Templates expect the object where OpenAI's clients send its text.
            shown["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": dict(known.arguments)}}
                for call, known in zip(message["tool_calls"], parsed.tool_calls, strict=True)
            ]
        # Templates build control tokens out of the role, so it stays a plain string; it is one of
        # the known ones.
        is_unknown = parsed.role == "developer" and not self._knows_developers
        role = "system" if is_unknown else parsed.role
        guarded: dict[str, Any] = vault.guard(shown)
        return guarded | {"role": role}

    def _run(self, vault: TextVault, variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(variables)
        except (TemplateError, *_RENDER_ERRORS) as error:
            reason = vault.reveal(str(error))[:_MAX_REASON] or type(error).__name__
            raise RequestError(
                f"{self._origin}{_line(error.__traceback__)} cannot render this conversation: "
                f"{reason}",
                param="messages",
            ) from error


def _compile(source: str, origin: str) -> Template:
    try:
        from jinja2 import TemplateSyntaxError, nodes, pass_context
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise UsageError(
            f"{origin} is a Jinja template, and jinja2 is not installed: pip install "
            "'cedar-llm[serve]'"
        ) from error

    class Generation(Extension):
        """``{% generation %}`` marks what a model is trained on; for a prompt it means nothing."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it an instance variable

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    for name in _TEXT_FILTERS:
        environment.filters[name] = on_real_text(environment.filters[name])
    environment.filters["tojson"] = pass_context(_tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"{origin}, line {error.lineno}: {error.message}; correct the template or pass another"
        ) from error


def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    vault: TextVault = context[_VAULT]
    text = json.dumps(
        vault.reveal(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return str(vault.guard(text))


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _line(traceback: TracebackType | None) -> str:
    """Returns ", line N" of the template, where Jinja wrote it into the traceback."""
    line = ""
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = f", line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def _cut_behind(pieces: list[str], message: Message) -> list[str]:
    """Cuts the pieces of a prompt behind the content of the message that is to be continued."""
    require_final_assistant(message)
    content = message.text("\n").strip()
    if not content:
        raise RequestError(
            "continue_final_message needs a last message with content, this one has none",
            param="continue_final_message",
        )
    for i in range(len(pieces) - 2, 0, -2):  # pieces begin and end with the template's text
        if pieces[i].strip() == content:
            return [*pieces[:i], pieces[i].rstrip()]
    raise RequestError(
        "the chat template does not write the last message as it was sent, so it cannot be "
        "continued; add a user message instead",
        param="continue_final_message",
    )
