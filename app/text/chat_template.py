"""Renders conversations with a model's chat template.

Knows: the templates of a model, the message format that templates expect. Must not know: token IDs,
HTTP, Jinja (`app/text/jinja_sandbox.py`).
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.images import split_parts
from app.core.model_files import Json, ModelFiles
from app.core.requests import Message, ToolCall
from app.core.thread_pools import CancelToken
from app.text.jinja_sandbox import Clock, SandboxedTemplate
from app.text.tokenizer import Tokenizer, find_model_stop_conditions, parse_special_token

# The template for models without a chat template. Such models were not trained on roles, so the
# contents of the messages are concatenated, and a single message is continued like a plain prompt.
# Using markers such as ChatML's would not work, because the model would treat them as text to
# imitate.
FALLBACK_TEMPLATE = "{{ messages | map(attribute='content') | join('\\n') }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentFormat:
    """How the contents of messages are passed to a template. image_roles: the roles whose content,
    if it has images, is a list of parts. image_text: the text of an image in the messages of other
    roles. requires_parts: whether every content is a list of parts."""

    image_roles: frozenset[str] = frozenset()
    image_text: str = ""
    requires_parts: bool = False

    def render(self, message: Message) -> str | list[dict[str, str]]:
        """Returns the content of a message."""
        if not (message.images or self.requires_parts):
            return message.content or ""
        parts = list(split_parts(message.content, message.images))
        if not (message.role in self.image_roles or self.requires_parts):
            texts = (part if isinstance(part, str) else self.image_text for part in parts)
            return "".join(texts)
        return [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in parts or [""]
        ]


class ChatTemplate:
    """The template of one model, or `FALLBACK_TEMPLATE`. Instances are immutable.

    includes_special_tokens: whether the rendered text already contains the special tokens at the
    start of a prompt, so that the tokenizer must not add them. It is False for `FALLBACK_TEMPLATE`,
    whose output is encoded like plain text.
    """

    def __init__(self, files: ModelFiles, now: Clock = datetime.now) -> None:
        """now: returns the current time, for templates that include the date.

        A separate file takes precedence over tokenizer_config.json. Raises AppError(MODEL_FILES) if
        a template is invalid.
        """
        sources = _read_sources(files)
        file = "tokenizer_config.json" if files.chat_template is None else files.chat_template_file
        location = f"{file} of {files.path}"
        self.includes_special_tokens = bool(sources)
        self._templates = {
            name: SandboxedTemplate(source, location=location)
            for name, source in (sources or {"default": FALLBACK_TEMPLATE}).items()
        }
        self._special_tokens = _read_special_tokens(files.tokenizer_config)
        self._now = now

    def get_source(self, *, tools: bool) -> str:
        """Returns the source of the template for conversations with or without tools."""
        return self._select(tools=tools).source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Json] | None = None,
        documents: Sequence[Json] | None = None,
        string_arguments: bool = False,
        content_format: ContentFormat | None = None,
        cancel_token: CancelToken | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Renders the prompt. string_arguments: whether the arguments of calls are passed as text.
        content_format: None for plain text. template_kwargs: additional template variables, such as
        enable_thinking.

        Raises AppError(INVALID) if the template rejects the conversation or cannot render it.
        Raises WorkCancelled when `cancel_token` is cancelled.
        """
        template = self._select(tools=tools is not None)
        context = {
            **self._special_tokens,
            **self._date_variables(template.source),
            **template_kwargs,
            "messages": [
                _to_template_message(
                    message,
                    f"messages.{index}",
                    template.source,
                    content_format or ContentFormat(),
                    string_arguments=string_arguments,
                )
                for index, message in enumerate(messages)
            ],
            "tools": tools,
            "documents": documents,
            **(self._functions_variables(tools) if "functions" in template.variables else {}),
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render(context, now=self._now, cancel_token=cancel_token)

    def _date_variables(self, source: str) -> dict[str, Any]:
        """Returns today's date for the templates of Llama 3.1 to 3.3, which otherwise render the
        date of their release."""
        if "date_string" not in source:
            return {}
        return {"date_string": self._now().strftime("%d %b %Y")}

    def _functions_variables(self, tools: Sequence[Json] | None) -> dict[str, Any]:
        """Returns the variables for Firefunction's template: the tools as text, and the current
        time."""
        if tools is None:
            return {}
        functions = [tool.get("function", tool) for tool in tools]
        return {
            "functions": json.dumps(functions, indent=4, ensure_ascii=False),
            "datetime": self._now().strftime("%Y-%m-%d %H:%M:%S"),
        }

    def get_variables(self, *, tools: bool) -> frozenset[str]:
        """Returns the variables that the template reads."""
        return self._select(tools=tools).variables

    def _select(self, *, tools: bool) -> SandboxedTemplate:
        default = self._templates["default"]
        return self._templates.get("tool_use", default) if tools else default


def build_tokenizer_info(
    files: ModelFiles, tokenizer: Tokenizer, *, context: int
) -> dict[str, Any]:
    """Returns the fields for clients that render prompts and count tokens themselves: the special
    tokens under their keys in tokenizer_config.json (None if the model lacks a token), the
    tokenizer class and the chat template. context: the maximum number of positions of one
    sequence."""
    ends = sorted(find_model_stop_conditions(files, tokenizer).ids)
    beginning = (
        None if tokenizer.bos_token_id is None else tokenizer.id_to_token(tokenizer.bos_token_id)
    )
    config = files.tokenizer_config
    return {
        "tokenizer_class": str(config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        "model_max_length": context,
        "add_bos_token": config.get("add_bos_token") is True,
        "bos_token": beginning,
        # config.json may define an end-of-sequence token when tokenizer_config.json does not
        "eos_token": tokenizer.id_to_token(ends[0]) if ends else None,
        **dict.fromkeys(("unk_token", "pad_token")),
        **_read_special_tokens(config),
        "chat_template": _read_sources(files).get("default"),
    }


def _read_sources(files: ModelFiles) -> dict[str, str]:
    """Returns the templates by name. The result is empty if the model has no template. Otherwise it
    contains a "default"."""
    if files.chat_template is not None:
        return {**files.named_templates, "default": files.chat_template}
    given: Any = files.tokenizer_config.get("chat_template")
    if given is None:
        return {}
    entries = [{"name": "default", "template": given}]
    sources: dict[str, str] = {}
    for entry in cast("list[Any]", given if isinstance(given, list) else entries):
        match entry:
            case {"name": str(name), "template": str(source)}:
                sources[name] = source
            case _:
                break
    if sources:
        sources = {**files.named_templates, **sources}
    if "default" not in sources:
        message = (
            f"chat_template in tokenizer_config.json of {files.path} must be a template or a list "
            'of {"name": …, "template": …} that includes a "default"'
        )
        raise AppError(ErrorKind.MODEL_FILES, message)
    return sources


def _read_special_tokens(config: Json) -> dict[str, Any]:
    """Returns the model's special tokens, such as bos_token and eos_token, for use in templates."""
    tokens: dict[str, Any] = {}
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        text = parse_special_token(config.get(f"{name}_token"))
        if text is not None:
            tokens[f"{name}_token"] = text
    more: Any = config.get("additional_special_tokens")
    if isinstance(more, list):
        tokens["additional_special_tokens"] = [
            parse_special_token(token) for token in cast("list[Any]", more)
        ]
    return tokens


def _to_template_message(
    message: Message,
    field: str,
    template: str,
    content_format: ContentFormat,
    *,
    string_arguments: bool,
) -> dict[str, Any]:
    """Converts a message to the format that the template expects. "developer" is OpenAI's newer
    name for "system"."""
    renamed = message.role == "developer" and "developer" not in template
    fields: dict[str, Any] = {
        "role": "system" if renamed else message.role,
        "content": content_format.render(message),
    }
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        fields |= dict.fromkeys(_reasoning_keys(message, template), message.reasoning)
    if message.tool_calls:
        fields["tool_calls"] = [
            _to_template_call(
                call,
                f"{field}.tool_calls.{index}.function.arguments",
                string_arguments=string_arguments,
            )
            for index, call in enumerate(message.tool_calls)
        ]
    return fields


def _reasoning_keys(message: Message, template: str) -> Iterator[str]:
    """Yields the template's keys for the reasoning of an earlier turn. gpt-oss uses the key
    "thinking", but its template rejects a turn with calls, content and thinking. In this case, the
    reasoning is omitted."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        crowded = name == "thinking" and message.tool_calls and message.content
        if re.search(rf"""(\.|\[['"]|['"]){name}\b""", template) and not crowded:
            yield name


def parse_arguments(call: ToolCall, field: str) -> dict[str, Any]:
    """Parses the arguments of a call in the history. Some clients send an empty string for a tool
    without parameters. It is parsed as an empty object. Raises AppError(INVALID), with the path
    `field`, for any other invalid text."""
    try:
        arguments: Any = json.loads(call.arguments) if call.arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        message = f"{field} is not valid JSON ({error}): send a JSON object as a string"
        raise AppError(ErrorKind.INVALID, message, param=field) from error
    if not isinstance(arguments, dict):
        message = f"{field} must be a JSON object with the arguments by name"
        raise AppError(ErrorKind.INVALID, message, param=field)
    return cast("dict[str, Any]", arguments)


def _to_template_call(call: ToolCall, field: str, *, string_arguments: bool) -> dict[str, Any]:
    """Converts a call. Most templates need the parsed arguments, because they render them in the
    model's own syntax."""
    arguments = parse_arguments(call, field)
    return {
        "id": call.id,
        "type": "function",
        "function": {
            "name": call.name,
            "arguments": (call.arguments.strip() or "{}") if string_arguments else arguments,
        },
    }
