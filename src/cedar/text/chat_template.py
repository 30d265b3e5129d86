"""The chat format of a model: which one it has, and one call for all of them.

Lives here: the choice, and the small format of the model that ships with cedar.  Does not live
here: the other formats (:mod:`cedar.text.jinja_template`, :mod:`cedar.text.deepseek_v41`) and the
step to token ids (:func:`cedar.text.segments.encode_segments`).  Called by the server, the offline
API and ``cedar chat``.

A model directory is asked in this order: a Jinja template, the DeepSeek-V4.1 format, the small
format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cedar.errors import CheckpointError, RequestError, UsageError
from cedar.text import deepseek_v41
from cedar.text.deepseek_markers import EOS, REQUIRED_MARKERS, THINK_OPEN
from cedar.text.dsml import TOOLS_PROMPT, tools_section
from cedar.text.jinja_template import JinjaTemplate
from cedar.text.messages import parse_messages, require_final_assistant
from cedar.text.segments import Marker, Segment, Text, join_texts, to_text

TEMPLATE_FILE = "chat_template.jinja"
TOOLS_PROMPT_FILE = "encoding/tools_prompt.txt"


class ChatTemplate(Protocol):
    """Writes conversations as prompts.

    Attributes:
        chat_format: ``jinja``, ``deepseek_v41`` or ``nano``.
        end_markers: control tokens that end an assistant's turn, beside the model's own.
        writes_dsml: whether the model calls tools in DSML, so that
            :class:`cedar.text.tool_calls.ToolCallParser` reads its answers.
    """

    chat_format: str
    end_markers: tuple[str, ...]
    writes_dsml: bool

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Writes a conversation, its begin-of-sequence token included.

        Args:
            messages: OpenAI-style messages.
            tools: OpenAI-style tool definitions.
            add_generation_prompt: end with what makes the model answer.
            continue_final_message: leave the last message, an assistant's, open to be continued;
                nothing is added behind it then.
            chat_template_kwargs: further settings of the format.

        Raises:
            RequestError: a message or a setting cannot be honoured.
        """
        ...


def load_chat_template(
    directory: str | Path, *, template_file: str | Path | None = None
) -> ChatTemplate:
    """Returns the chat format of a model directory.

    Args:
        directory: a model directory in Hugging Face layout.
        template_file: a Jinja template to use instead of what the directory has.

    Raises:
        UsageError: the directory has no chat format, or ``template_file`` does not exist.
        CheckpointError: a file is damaged or a template has a syntax error.
    """
    directory = Path(directory)
    config = _read_json(directory / "tokenizer_config.json")
    control_tokens = _control_tokens(directory)
    source, origin = _jinja_source(directory, config, template_file)
    if source is not None:
        return JinjaTemplate(
            source,
            origin=origin,
            special_tokens=_special_tokens(config),
            control_tokens=control_tokens,
        )
    model_type = _read_json(directory / "config.json").get("model_type")
    if model_type == "deepseek_v41" and control_tokens.issuperset(REQUIRED_MARKERS):
        return DeepseekV41Template(_tools_prompt(directory))
    if control_tokens.issuperset(NanoTemplate.required_markers):
        return NanoTemplate()
    raise UsageError(
        f"{directory} has no chat format: neither {TEMPLATE_FILE} nor a chat_template in "
        "tokenizer_config.json, and its vocabulary has the turn markers of no format that cedar "
        "knows. Use plain completions, or pass a template with --chat-template FILE"
    )


def starts_in_reasoning(prompt: Sequence[Segment]) -> bool:
    """Returns whether the model's output to ``prompt`` begins inside its reasoning."""
    markers = [segment for segment in prompt if isinstance(segment, Marker)]
    if markers and markers[-1].text == THINK_OPEN:
        return True
    # In some vocabularies <think> is no control token.
    return to_text(prompt[-1:]).rstrip().endswith(THINK_OPEN)


class DeepseekV41Template:
    """The format of DeepSeek-V4.1 behind the common call.

    ``chat_template_kwargs`` may hold ``thinking`` (or ``enable_thinking``), ``reasoning_effort``
    and ``drop_thinking``; :class:`cedar.text.deepseek_v41.PromptOptions` explains them.

    Args:
        tools_prompt: the instructions for tool calls.

    Raises:
        CheckpointError: ``tools_prompt`` has no place for the tools.
    """

    chat_format = "deepseek_v41"
    end_markers: tuple[str, ...] = (EOS,)
    writes_dsml = True

    def __init__(self, tools_prompt: str = TOOLS_PROMPT) -> None:
        tools_section([], tools_prompt)  # a broken file is found now, not at the first request
        self._tools_prompt = tools_prompt

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Writes a conversation; see :class:`ChatTemplate`."""
        settings = dict(chat_template_kwargs or {})
        effort = settings.pop("reasoning_effort", None)
        if "enable_thinking" in settings:
            settings.setdefault("thinking", settings.pop("enable_thinking"))
        switches = {"thinking": True, "drop_thinking": True}
        for name, value in settings.items():
            if name not in switches:
                raise RequestError(
                    f"chat_template_kwargs.{name} is not known to this format; it has thinking, "
                    "enable_thinking, reasoning_effort and drop_thinking",
                    param="chat_template_kwargs",
                )
            if not isinstance(value, bool):
                raise RequestError(
                    f"chat_template_kwargs.{name} is {value!r}; it must be true or false",
                    param="chat_template_kwargs",
                )
            switches[name] = value
        options = deepseek_v41.PromptOptions(
            thinking=switches["thinking"],
            reasoning_effort=effort,
            drop_thinking=switches["drop_thinking"],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools_prompt=self._tools_prompt,
        )
        return deepseek_v41.render(messages, tools=tools, options=options)


class NanoTemplate:
    """The format of the small model that ships with cedar: marked turns and nothing else.

    ``<|bos|><|system|>..<|end|><|user|>..<|end|><|assistant|>..<|end|>``, as in its training data
    (:func:`cedar.training.chats.render_chat`).
    """

    chat_format = "nano"
    end_markers: tuple[str, ...] = ("<|end|>",)
    writes_dsml = False
    required_markers = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Writes a conversation; see :class:`ChatTemplate`."""
        for name, value in (("tools", tools), ("chat_template_kwargs", chat_template_kwargs)):
            if value:
                raise RequestError(
                    f"this model's chat format knows no {name}; leave {name} out", param=name
                )
        markers = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
        markers["developer"] = markers["system"]
        segments: list[Segment] = [Marker("<|bos|>")]
        parsed = parse_messages(messages)
        for i, message in enumerate(parsed):
            if message.role not in markers or message.tool_calls:
                raise RequestError(
                    f"messages[{i}] is a {message.role} message"
                    f"{' with tool calls' if message.tool_calls else ''}; this model's chat "
                    "format has system, user and assistant turns of plain text",
                    param=f"messages[{i}]",
                )
            segments += [Marker(markers[message.role]), Text(message.text()), Marker("<|end|>")]
        if continue_final_message:
            require_final_assistant(parsed[-1])
            segments.pop()
        elif add_generation_prompt:
            segments.append(Marker(markers["assistant"]))
        return join_texts(segments)


def _jinja_source(
    directory: Path, config: Mapping[str, Any], template_file: str | Path | None
) -> tuple[str | None, str]:
    """Returns the source and the name of the template, None where there is none."""
    file = Path(template_file) if template_file is not None else directory / TEMPLATE_FILE
    if file.is_file():
        return _read_text(file), str(file)
    if template_file is not None:
        raise UsageError(f"the chat template {file} does not exist or is no file")
    origin = f"chat_template in {directory / 'tokenizer_config.json'}"
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        named = {entry.get("name"): entry for entry in template if isinstance(entry, Mapping)}
        template = named.get("default", {}).get("template")
        if template is None:
            raise CheckpointError(f"{origin} lists templates, but none that is named default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{origin} is a {type(template).__name__}, expected a string")
    return template, origin


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _control_tokens(directory: Path) -> frozenset[str]:
    entries = _read_json(directory / "tokenizer.json").get("added_tokens") or []
    return frozenset(entry["content"] for entry in entries if "content" in entry)


def _tools_prompt(directory: Path) -> str:
    file = directory / TOOLS_PROMPT_FILE
    return _read_text(file) if file.is_file() else TOOLS_PROMPT


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        document = json.loads(_read_text(file))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{file} holds a {type(document).__name__}, expected an object")
    return document


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as UTF-8 text: {error}") from error
