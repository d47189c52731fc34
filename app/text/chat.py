"""Conversations → prompts, through the model's own chat template.

Knows: which template a model brings, and how messages look to it. Must not know: token ids, HTTP,
or what Jinja is (`app/text/template.py` does).
"""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, cast

from app.core.errors import AppError, Kind
from app.core.files import Json, ModelFiles
from app.core.requests import CalledTool, Message
from app.core.workers import CancelToken
from app.text.template import Clock, Template
from app.text.tokenizer import Tokenizer, special_text, stops

# For models that bring no template, which are models that have learnt no roles: what was said,
# one after the other, so that a conversation of one message is continued like a plain prompt. Any
# markers we could make up (ChatML, say) are to such a model just more text to imitate.
PLAIN = "{{ messages | map(attribute='content') | join('\\n') }}"


class ChatTemplate:
    """One model's template, or `PLAIN`; immutable.

    complete: its text brings the special tokens that begin a prompt, so encode it without adding
    any. False for `PLAIN`, whose text is encoded like any other.
    """

    def __init__(self, files: ModelFiles, now: Clock = datetime.now) -> None:
        """now: the clock of templates that tell the model what day it is.

        A separate chat_template.jinja wins over the one in tokenizer_config.json. Raises
        AppError(MODEL_FILES) when a template is broken.
        """
        sources = _sources(files)
        file = "tokenizer_config.json" if files.template is None else "chat_template.jinja"
        place = f"{file} of {files.path}"
        self.complete = bool(sources)
        self._templates = {
            name: Template(source, place=place)
            for name, source in (sources or {"default": PLAIN}).items()
        }
        self._special = _special_tokens(files.tokenizer_config)
        self._now = now

    def source(self, *, tools: bool) -> str:
        """What renders conversations with tools, or without."""
        return self._chosen(tools=tools).source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Json] | None = None,
        documents: Sequence[Json] | None = None,
        spelled: bool = False,
        token: CancelToken | None = None,
        **options: Any,
    ) -> str:
        """The prompt. spelled: calls get their arguments as text. options: whatever else the
        template asks for, such as enable_thinking.

        Raises AppError(INVALID) when the template refuses the conversation or fails on it.
        Cancelled when `token` is.
        """
        template = self._chosen(tools=tools is not None)
        context = {
            **self._special,
            **options,
            "messages": [
                _message(message, f"messages.{place}", template.source, spelled=spelled)
                for place, message in enumerate(messages)
            ],
            "tools": tools,
            "documents": documents,
            **(self._in_words(tools) if "functions" in template.variables else {}),
            "add_generation_prompt": add_generation_prompt,
        }
        return template.render(context, now=self._now, token=token)

    def _in_words(self, tools: Sequence[Json] | None) -> dict[str, Any]:
        """Firefunction's template wants the tools written out, and what time it is."""
        if tools is None:
            return {}
        functions = [tool.get("function", tool) for tool in tools]
        return {
            "functions": json.dumps(functions, indent=4, ensure_ascii=False),
            "datetime": self._now().strftime("%Y-%m-%d %H:%M:%S"),
        }

    def variables(self, *, tools: bool) -> frozenset[str]:
        """What that template looks for in its context."""
        return self._chosen(tools=tools).variables

    def _chosen(self, *, tools: bool) -> Template:
        default = self._templates["default"]
        return self._templates.get("tool_use", default) if tools else default


def tokenizer_info(files: ModelFiles, tokenizer: Tokenizer, *, context: int) -> dict[str, Any]:
    """What clients that render and count by themselves look for: the keys of tokenizer_config.json
    that speak of special tokens, None for those that the model does not have, its class and the
    chat template. context: positions of one sequence."""
    ends = sorted(stops(files, tokenizer).ids)
    beginning = None if tokenizer.bos is None else tokenizer.name(tokenizer.bos)
    config = files.tokenizer_config
    return {
        "tokenizer_class": str(config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
        "model_max_length": context,
        "add_bos_token": config.get("add_bos_token") is True,
        "bos_token": beginning,
        # where tokenizer_config.json names none, config.json may
        "eos_token": tokenizer.name(ends[0]) if ends else None,
        **dict.fromkeys(("unk_token", "pad_token")),
        **_special_tokens(config),
        "chat_template": _sources(files).get("default"),
    }


def _sources(files: ModelFiles) -> dict[str, str]:
    """Name → template. Empty when the model brings none, else with a "default"."""
    if files.template is not None:
        return {"default": files.template}
    given: Any = files.tokenizer_config.get("chat_template")
    if given is None:
        return {}
    alone = [{"name": "default", "template": given}]
    sources: dict[str, str] = {}
    for entry in cast("list[Any]", given if isinstance(given, list) else alone):
        match entry:
            case {"name": str(name), "template": str(source)}:
                sources[name] = source
            case _:
                break
    if "default" not in sources:
        message = (
            f"chat_template in tokenizer_config.json of {files.path} must be a template or a list "
            'of {"name": …, "template": …} that includes a "default"'
        )
        raise AppError(Kind.MODEL_FILES, message)
    return sources


def _special_tokens(config: Json) -> dict[str, Any]:
    """What templates call bos_token, eos_token and so on, as far as the model has them."""
    tokens: dict[str, Any] = {}
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        text = special_text(config.get(f"{name}_token"))
        if text is not None:
            tokens[f"{name}_token"] = text
    more: Any = config.get("additional_special_tokens")
    if isinstance(more, list):
        tokens["additional_special_tokens"] = [
            special_text(token) for token in cast("list[Any]", more)
        ]
    return tokens


def _message(message: Message, field: str, template: str, *, spelled: bool) -> dict[str, Any]:
    """A message as the template expects it. "developer" is OpenAI's newer word for "system"."""
    renamed = message.role == "developer" and "developer" not in template
    said: dict[str, Any] = {
        "role": "system" if renamed else message.role,
        "content": message.content or "",
    }
    if message.name is not None:
        said["name"] = message.name
    if message.tool_call_id is not None:
        said["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        said |= dict.fromkeys(_reasoning_names(message, template), message.reasoning)
    if message.tool_calls:
        said["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls.{place}.function.arguments", spelled=spelled)
            for place, call in enumerate(message.tool_calls)
        ]
    return said


def _reasoning_names(message: Message, template: str) -> Iterator[str]:
    """What the template calls an earlier turn's reasoning. gpt-oss's calls it thinking, and refuses
    a turn that has calls, content and thinking: there it is the content that counts."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        crowded = name == "thinking" and message.tool_calls and message.content
        if re.search(rf"""(\.|\[['"]|['"]){name}\b""", template) and not crowded:
            yield name


def arguments_of(call: CalledTool, field: str) -> dict[str, Any]:
    """The object that the arguments of a call in the history are. An empty text, which some clients
    send for a tool without parameters, is the empty object. Raises AppError(INVALID) for any other
    text, with `field` as the place."""
    try:
        arguments: Any = json.loads(call.arguments) if call.arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        message = f"{field} is not valid JSON ({error}): send a JSON object as a string"
        raise AppError(Kind.INVALID, message, param=field) from error
    if not isinstance(arguments, dict):
        message = f"{field} must be a JSON object with the arguments by name"
        raise AppError(Kind.INVALID, message, param=field)
    return cast("dict[str, Any]", arguments)


def _tool_call(call: CalledTool, field: str, *, spelled: bool) -> dict[str, Any]:
    """Most templates write arguments in their models' own syntax, so they want the object."""
    arguments = arguments_of(call, field)
    return {
        "id": call.id,
        "type": "function",
        "function": {
            "name": call.name,
            "arguments": (call.arguments.strip() or "{}") if spelled else arguments,
        },
    }
