"""The interactive chat of `mlxrunner run`.

Knows: the terminal's line editor, pasted text, its history, Ctrl-C and Ctrl-D. Must not know: the
commands of a chat, the requests.

Ctrl-C during an answer closes its connection, so the server stops generating. Ctrl-C at the prompt
only prints a hint.

Pasted text of several lines is one message. The terminal encloses it in two escape sequences
(bracketed paste, https://invisible-island.net/xterm/ctlseqs/ctlseqs.html). GNU readline then
returns all of its lines at once. libedit, the editor of some builds of Python, returns them one by
one; it replaces the sequences with two marks.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType

from app.commands.answer import AnswerPrinter
from app.commands.chat_client import ChatMessage, ChatOptions, stream_chat
from app.commands.chat_commands import ChatCommands, ChatState, find_image_path
from app.commands.chat_engine import ChatEngine
from app.commands.client_programs import Endpoint
from app.config.precedence import find_state_folder
from app.core.errors import AppError, escape_control_characters
from app.core.terminal import print_message

_PROMPT, _CONTINUATION = ">>> ", "... "
_FENCE = '"""'

_MAX_HISTORY = 1000

# switches bracketed paste on and off
_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"

# the start and the end of pasted text in libedit: pairs of invisible characters that no text has
_PASTE_BEGIN, _PASTE_END = "\u2063\u2060", "\u2060\u2063"

_EXIT_HINT = "Use Ctrl-D or /bye to exit."


class Chat:
    """One chat on the terminal. endpoint: the first model."""

    def __init__(
        self, engine: ChatEngine, endpoint: Endpoint, options: ChatOptions, *, verbose: bool
    ) -> None:
        self._engine = engine
        self._state = ChatState(endpoint=endpoint, options=options, verbose=verbose)
        self._commands = ChatCommands(engine, self._state)
        self._read_line: Callable[[str], str] = input

    def run(self, *, history: bool) -> int:
        """Chats until the user ends the chat, and returns the exit status. history: whether the
        lines are kept for the next chat."""
        self._state.history = history
        model = escape_control_characters(self._state.endpoint.model)
        print(f"{model}: type a message, /? for help, Ctrl-D to exit.")
        with _edit_lines(self._state) as self._read_line:
            while True:
                try:
                    if not self._take_turn():
                        return 0
                except KeyboardInterrupt:
                    print(f"\n{_EXIT_HINT}", flush=True)
                except EOFError:
                    print(flush=True)
                    return 0
                except AppError as error:
                    print_message(error.message)

    def _take_turn(self) -> bool:
        """Reads a message or a command. Returns whether the chat continues."""
        text, is_command = _read_message(self._read_line)
        if (dropped := find_image_path(text)) is not None:
            path, text = dropped
            self._commands.attach(path)
        elif is_command:
            return self._commands.run(text)
        if text.strip():
            self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        """Answers a message. The conversation keeps the part of the answer that was generated. A
        message without any answer is removed."""
        state = self._state
        question = ChatMessage(role="user", content=text, images=state.images)
        state.images = ()
        messages = [*state.messages, question]
        printer = AnswerPrinter(
            state.endpoint.model, verbose=state.verbose, load=self._engine.take_load_seconds()
        )
        try:
            with stream_chat(state.endpoint, messages, state.options) as events:
                printer.print_events(events)
        except KeyboardInterrupt:
            print("(stopped)", file=sys.stderr, flush=True)
        finally:
            if printer.text:
                state.messages = [*messages, ChatMessage(role="assistant", content=printer.text)]


def _read_message(read_line: Callable[[str], str]) -> tuple[str, bool]:
    """Reads one line, pasted lines, or the lines between two fences, which may also enclose a
    system message. Returns the text, and whether it is a command. Raises EOFError at the end of the
    input."""
    line = read_line(_PROMPT)
    before, fence, after = line.partition(_FENCE)
    is_fenced = fence and (not before.strip() or before.startswith("/set system"))
    if is_fenced and _FENCE in after.rstrip().removesuffix(_FENCE):
        is_fenced = False  # the first of several texts in quotes, as in a pasted program
    if not is_fenced:
        return line, line.startswith("/") and "\n" not in line.rstrip()
    lines = [after]
    while not lines[-1].rstrip().endswith(_FENCE):
        lines.append(read_line(_CONTINUATION))
    text = "\n".join(lines).rstrip().removesuffix(_FENCE).strip("\n")
    return f"{before}{text}", before.startswith("/")


@contextlib.contextmanager
def _edit_lines(state: ChatState) -> Generator[Callable[[str], str]]:
    """Enables the line editor, where Python has it, and its history. Yields the function that reads
    a line, or pasted lines."""
    try:
        import readline
    except ImportError:  # Python was built without it
        yield input
        return
    read_line = _enable_paste(readline)
    file = _find_history_file()
    if state.history and file is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(file)
    try:
        yield read_line
    finally:
        if state.history and file is not None:
            _write_history(readline, file)


def _enable_paste(readline: ModuleType) -> Callable[[str], str]:
    """Enables bracketed paste, unless the terminal has no escape sequences. Returns the function
    that reads a line."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if "libedit" not in (readline.__doc__ or ""):
        # some distributions turn it off
        word = "on" if is_terminal else "off"
        readline.parse_and_bind(f"set enable-bracketed-paste {word}")
        return input
    if not is_terminal:
        return input
    for number, mark in ((200, _PASTE_BEGIN), (201, _PASTE_END)):
        readline.parse_and_bind(f'bind -s "\\e[{number}~" "{mark}"')
    return _read_marked_lines


def _read_marked_lines(prompt: str) -> str:
    """Reads a line, or lines until the end of the pasted text that begins in them."""
    sys.stdout.write(_PASTE_ON)
    try:
        text = input(prompt)
        while text.count(_PASTE_BEGIN) > text.count(_PASTE_END):
            text += "\n" + input()
    finally:
        sys.stdout.write(_PASTE_OFF)
        sys.stdout.flush()
    return text.replace(_PASTE_BEGIN, "").replace(_PASTE_END, "")


def _write_history(readline: ModuleType, file: Path) -> None:
    """Writes the history, which only its owner may read. A disk that cannot be written is not
    reported as an error."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        readline.set_history_length(_MAX_HISTORY)
        readline.write_history_file(file)


def _find_history_file() -> Path | None:
    """Returns the path in the user's state folder; None without a home folder."""
    folder = find_state_folder(os.environ)
    return None if folder is None else folder / "chat_history"
