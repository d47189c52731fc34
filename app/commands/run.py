"""`mlxrunner run`: asks a model one question, or chats with it.

Knows: the words of the command line, stdin, the exit status. Must not know: how a model is loaded,
the commands of a chat.
"""

import math
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from app.commands.answer import AnswerPrinter
from app.commands.chat_client import ChatMessage, ChatOptions, read_format, stream_chat
from app.commands.chat_engine import ChatEngine
from app.commands.servers import find_configured
from app.config.precedence import ResolvedConfig
from app.core.errors import AppError, ErrorKind
from app.core.runtime import handle_signals
from app.core.settings import ModelSettings, Settings
from app.store.model_names import ModelNotFoundError

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

# a word that is probably a prompt if there is no model of this name
_WORD = re.compile(r"[A-Za-z]+[.!?]*")

# the beginnings of a path, which is a model even if it contains spaces
_PATH_STARTS = ("/", "./", "../", "~")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command line. words: the model and the prompt. output_format: "json" or the path of a
    JSON schema. think: whether the model reasons; None for its default. parameters: sampling
    parameters. history: whether the lines of a chat are kept for the next one."""

    words: tuple[str, ...] = ()
    system: str | None = None
    think: bool | None = None
    output_format: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    verbose: bool = False
    history: bool = True


def run(options: RunOptions, configuration: ResolvedConfig) -> int:
    """Answers the prompt, or chats until the user ends the chat. Returns the exit status. Raises
    AppError if there is no prompt, or the model cannot be loaded or used. Raises KeyboardInterrupt
    after Ctrl-C, except in a chat."""
    settings = configuration.settings
    model, prompt = split_words(options.words)
    prompt = join_prompt(_read_stdin(), prompt)
    if prompt is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        word = "" if model is None else f" ({model} is read as the model)"
        raise AppError(
            ErrorKind.INVALID,
            f"there is no prompt{word}: write it after the model, or pipe it to the command; a "
            "chat needs a terminal",
        )
    chat_options = _make_chat_options(options, configuration)
    with handle_signals(_SIGNALS, _exit), ChatEngine(configuration) as engine:
        chosen = _choose_model(model, settings)
        try:
            endpoint = engine.connect(chosen)
        except ModelNotFoundError as error:
            if len(options.words) != 1 or not _WORD.fullmatch(options.words[0]):
                raise
            hint = f"a prompt of one word follows the model: `mlxrunner run builtin {model}`"
            raise AppError(error.kind, f"{error.message}; {hint}") from error
        if prompt is None:
            from app.commands.chat import Chat

            chat = Chat(engine, endpoint, chat_options, verbose=options.verbose)
            return chat.run(history=options.history)
        printer = AnswerPrinter(
            endpoint.model, verbose=options.verbose, load=engine.take_load_seconds()
        )
        messages = [ChatMessage(role="user", content=prompt)]
        with stream_chat(endpoint, messages, chat_options) as events:
            printer.print_events(events)
    return 0


def split_words(words: tuple[str, ...]) -> tuple[str | None, str | None]:
    """Returns the model and the prompt. The first word is the model, unless it contains a space and
    is not a path, because names of models contain no spaces."""
    if not words:
        return None, None
    first, *rest = words
    is_text = any(character.isspace() for character in first.strip())
    if is_text and not first.startswith(_PATH_STARTS) and not Path(first).is_dir():
        return None, " ".join(words)
    return first, " ".join(rest) or None


def join_prompt(piped: str | None, prompt: str | None) -> str | None:
    """Returns the text from stdin and the prompt. As in Ollama, the text comes first, so that
    several questions about one file share the cached prefix."""
    parts = [part for part in (piped and piped.rstrip("\n"), prompt) if part and part.strip()]
    return "\n\n".join(parts) or None


def _read_stdin() -> str | None:
    """Reads all of stdin, unless it is a terminal or closed."""
    if sys.stdin is None or sys.stdin.isatty():  # pyright: ignore[reportUnnecessaryComparison]  # None if it was closed
        return None
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        message = f"stdin is not text in {error.encoding}: pipe a text file"
        raise AppError(ErrorKind.INVALID, message) from None


def _choose_model(name: str | None, settings: Settings) -> ModelSettings | None:
    """Returns the model of the command line, with its settings in the file, if any; otherwise the
    first model of the settings."""
    if name is None:
        return settings.models[0] if settings.models else None
    return find_configured(settings, name)


def _make_chat_options(options: RunOptions, configuration: ResolvedConfig) -> ChatOptions:
    # a time from another source is meant for the server's own models
    keep_alive = configuration.settings.keep_alive
    if not configuration.sources["keep_alive"].startswith("-"):
        keep_alive = None
    return ChatOptions(
        system=options.system,
        think=options.think,
        output_format=None if options.output_format is None else read_format(options.output_format),
        parameters=options.parameters,
        keep_alive=-1 if keep_alive == math.inf else keep_alive,
    )


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Exits after SIGTERM and SIGHUP as after an error, so that the server that was
    started stops and temporary files are deleted."""
    raise SystemExit(128 + number)
