"""The commands of a chat: /set, /show, /load, /save, /clear, /help and /bye, as in Ollama, and
/image.

Knows: their words, the state of a chat. Must not know: the terminal's line editor, answers.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.commands.chat_client import ChatMessage, ChatOptions, read_format, read_image_file
from app.commands.chat_engine import ChatEngine
from app.commands.client_programs import Endpoint
from app.commands.servers import RunningServer
from app.core.errors import AppError, ErrorKind, escape_control_characters, suggest
from app.core.models import ModelRecipe
from app.core.sampling_params import SAMPLING_KNOBS, SamplingKnob

HELP = """\
  /set system TEXT          set the system message
  /set parameter NAME VALUE set a sampling parameter: {parameters}
  /set think | nothink      let the model reason, or not
  /set format json | FILE   answer in JSON, or follow the JSON schema in a file; noformat ends it
  /set verbose | quiet      show the speed of each answer, or not
  /set history | nohistory  keep the lines that you type for the next chat, or not
  /show [info | parameters | system | template | license]
                            describe the model
  /image FILE               send an image with the next message; a file that is dropped on the
                            terminal does the same
  /load MODEL               chat with another model, in a new conversation
  /save NAME                save the system message, the parameters and the conversation as a model
  /clear                    start a new conversation
  /bye                      end the chat (also Ctrl-D)

  \"\"\" begins and ends a message of several lines. Ctrl-C stops the answer.
"""

_COMMANDS = ("/set", "/show", "/image", "/load", "/save", "/clear", "/help", "/?", "/bye", "/exit")
_SETTABLE = (
    *("system", "parameter", "think", "nothink", "format", "noformat"),
    *("verbose", "quiet", "history", "nohistory"),
)

# a path in quotes, or with backslashes before spaces
_PATH = re.compile(r"""\s*(?:'([^']+)'|"([^"]+)"|((?:\\.|[^\s\\'"])+))(?=\s|$)""")

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")

# Ollama's name of a limit -> its name in a request
_LIMITS = {"num_predict": "max_tokens", "max_tokens": "max_tokens"}

# the name of a parameter in a request -> in Ollama's models, if it differs
_MODEL_NAMES = {
    "max_tokens": "num_predict",
    **{knob.name: knob.runner_name for knob in SAMPLING_KNOBS if knob.runner_name is not None},
}

_KNOBS: Mapping[str, SamplingKnob] = {
    name: knob
    for knob in SAMPLING_KNOBS
    for name in (knob.name, knob.runner_name)
    if name is not None
}


@dataclass(slots=True)
class ChatState:
    """A chat. messages: the conversation without the system message. images: data URLs for the next
    message."""

    endpoint: Endpoint
    options: ChatOptions
    verbose: bool = False
    history: bool = True
    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    images: tuple[str, ...] = ()


class ChatCommands:
    """Runs the commands of a chat, which change its state."""

    def __init__(self, engine: ChatEngine, state: ChatState) -> None:
        self._engine = engine
        self._state = state

    def run(self, line: str) -> bool:
        """Runs a line that begins with a slash. Returns whether the chat continues. Raises
        AppError(INVALID) for a line that is not a command."""
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match command:
            case "/bye" | "/exit":
                return False
            case "/help" | "/?":
                parameters = ", ".join([*sorted({knob.name for knob in SAMPLING_KNOBS}), "stop"])
                print(HELP.format(parameters=f"{parameters}, max_tokens"), end="")
            case "/clear":
                self._state.messages.clear()
                self._state.images = ()
                print("Started a new conversation.")
            case "/image":
                self._attach(rest)
            case "/load":
                self._load(rest)
            case "/save":
                self._save(rest)
            case "/show":
                self._show(rest)
            case "/set":
                self._set(rest)
            case _:
                raise _usage_error(
                    f"unknown command {command}{suggest(command, _COMMANDS)}; /? lists the commands"
                )
        return True

    def _attach(self, rest: str) -> None:
        if not rest:
            raise _usage_error("which image? /image FILE")
        dropped = find_image_path(rest)
        self.attach(dropped[0] if dropped is not None else Path(rest))

    def attach(self, path: Path) -> None:
        """Sends an image with the next message. Raises AppError(INVALID)."""
        self._state.images += (read_image_file(path),)
        print(f"The next message has the image {path.name}.")

    def _load(self, name: str) -> None:
        if not name:
            raise _usage_error("which model? /load MODEL")
        self._state.endpoint = self._engine.connect(self._engine.find_model(name))
        self._state.messages.clear()
        print(f"Loaded {self._state.endpoint.model}.")

    def _save(self, name: str) -> None:
        """Saves the chat as a model, as in Ollama. The format and the reasoning are not part of a
        model. Its messages have no images."""
        if not name:
            raise _usage_error("under which name? /save NAME")
        state = self._state
        if any(message.images for message in state.messages):
            raise _usage_error(
                "a model cannot contain the images of this conversation: /clear it before /save"
            )
        recipe = ModelRecipe(
            name=name,
            base=None,
            system=state.options.system,
            parameters=_get_model_parameters(state.options),
            messages=tuple((message.role, message.content) for message in state.messages),
        )
        saved = self._engine.save(state.endpoint, recipe)
        print(f"Saved this chat as {saved}: /load {saved} or `mlxrunner run {saved}` continues it.")

    def _set(self, rest: str) -> None:
        what, _, value = rest.partition(" ")
        value = value.strip()
        state = self._state
        if what in _KNOBS or what in _LIMITS or what == "stop":  # without the word `parameter`
            what, value = "parameter", rest
        match what:
            case "system":
                state.options = replace(state.options, system=_unquote(value) or None)
                print("Set the system message." if value else "Removed the system message.")
            case "parameter":
                self._set_parameter(value)
            case "think" | "nothink":
                think = value or True if what == "think" else False
                state.options = replace(state.options, think=think)
                print(f"Set {rest}.")
            case "format":
                if not value:
                    raise _usage_error("which format? /set format json, or a file with a schema")
                state.options = replace(state.options, output_format=read_format(value))
                print(f"Set the format to {value}.")
            case "noformat":
                state.options = replace(state.options, output_format=None)
                print("Removed the format.")
            case "verbose" | "quiet":
                state.verbose = what == "verbose"
                print(f"Set {what}.")
            case "history" | "nohistory":
                state.history = what == "history"
                print(f"Set {what}.")
            case _:
                known = suggest(what, [*_SETTABLE, *_KNOBS]) if what else ""
                raise _usage_error(
                    f"/set {what or 'WHAT'} is unknown{known}; /? lists the settings"
                )

    def _set_parameter(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        name, text = name.strip(), text.strip()
        if not name or not text:
            raise _usage_error("name and value? /set parameter NAME VALUE")
        key, value = parse_parameter(name, text)
        self._state.options = self._state.options.set_parameter(key, value)
        print(f"Set {name} to {text}." if value is not None else f"Reset {name}.")

    def _show(self, what: str) -> None:
        endpoint = self._state.endpoint
        server = RunningServer(url=endpoint.url, api_key=endpoint.api_key)
        fields = server.send("POST", "/api/show", {"model": endpoint.model})
        options = self._state.options
        shows: Mapping[str, Callable[[], str]] = {
            "info": lambda: _render_info(endpoint, fields),
            "parameters": lambda: _render_parameters(options, fields),
            "system": lambda: options.system or str(fields.get("system") or "no system message"),
            "template": lambda: str(fields.get("template") or "no template"),
            "license": lambda: str(fields.get("license") or "no license"),
        }
        show = shows.get(what or "info")
        if show is None:
            listed = ", ".join(shows)
            raise _usage_error(f"/show {what} is unknown{suggest(what, shows)}: /show {listed}")
        for line in show().split("\n"):  # a text of the model could control the terminal
            print(escape_control_characters(line.expandtabs()))


def find_image_path(line: str) -> tuple[Path, str] | None:
    """Returns the path of an image file at the start of a line, and the rest of the line; None if
    there is none. Terminals type the path of a file that is dropped on them, in quotes or with
    backslashes before spaces."""
    found = _PATH.match(line)
    if found is None:
        return None
    path = Path(found[1] or found[2] or re.sub(r"\\(.)", r"\1", found[3])).expanduser()
    if path.suffix.lower() not in _IMAGE_SUFFIXES or not path.is_file():
        return None
    return path, line[found.end() :].strip()


def _get_model_parameters(options: ChatOptions) -> Mapping[str, Any]:
    """Returns the parameters with their names in Ollama's models."""
    return {_MODEL_NAMES.get(name, name): value for name, value in options.parameters.items()}


def parse_parameter(name: str, text: str) -> tuple[str, Any]:
    """Returns the name of a parameter in a request and its value; None for `default`, which resets
    it. Raises AppError(INVALID) for an unknown name and a value out of range."""
    knob, key = _KNOBS.get(name), _LIMITS.get(name, name)
    if knob is not None:
        key = knob.name
    elif name == "num_ctx":
        raise _usage_error("the context length is fixed when a model is loaded: use --context")
    elif name != "stop" and name not in _LIMITS:
        raise _usage_error(f"{name} is not a parameter{suggest(name, [*_KNOBS, 'stop', *_LIMITS])}")
    if text == "default":
        return key, None
    if name == "stop":
        return key, shlex.split(text)
    try:
        value = int(text) if knob is None or knob.kind is int else float(text)
    except ValueError:
        value = None
    low, high = (1, float("inf")) if knob is None else (knob.low, knob.high)
    if value is None or not low <= value <= high:
        kind = "a whole number" if knob is None or knob.kind is int else "a number"
        limits = f"from {low:g}" + ("" if high == float("inf") else f" to {high:g}")
        raise _usage_error(f"{name} must be {kind} {limits}, not {text}")
    return key, value


def _render_info(endpoint: Endpoint, fields: Mapping[str, Any]) -> str:
    details: Mapping[str, Any] = fields.get("details") or {}
    rows = {
        "model": endpoint.model,
        "architecture": details.get("family"),
        "parameters": details.get("parameter_size"),
        "quantization": details.get("quantization_level"),
        "context": f"{endpoint.context_length} tokens",
        "capabilities": ", ".join(fields.get("capabilities") or ()),
    }
    return "\n".join(f"  {label:<14}{value}" for label, value in rows.items() if value)


def _render_parameters(options: ChatOptions, fields: Mapping[str, Any]) -> str:
    own = [f"{name:<30} {value}" for name, value in options.parameters.items()]
    parts = ["of the model:", str(fields.get("parameters") or "none")]
    return "\n".join([*parts, "of this chat:", *(own or ["none"])])


def _unquote(text: str) -> str:
    """Removes the quotation marks around text."""
    for mark in ('"""', '"'):
        if text.startswith(mark) and text.endswith(mark) and len(text) >= 2 * len(mark):
            return text[len(mark) : -len(mark)].strip()
    return text


def _usage_error(message: str) -> AppError:
    return AppError(ErrorKind.INVALID, message)
