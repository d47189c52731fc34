"""The chat of `mlxrunner run`: its commands, its history, and the line editor of a terminal."""

import re
import sys
from collections.abc import Callable, Sequence
from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path

import pytest

from app import cli, store
from app.commands import chat_engine
from app.commands.chat_engine import ChatEngine
from app.config.precedence import resolve_config
from app.core.errors import AppError
from app.core.models import ModelRecipe
from app.core.requests import Conversation
from app.core.settings import ModelSettings, Settings
from tests.api.asgi import serve_app
from tests.commands.run_command import ANSWER, QUESTION, FakeTerminal, OwnEngines, Runner
from tests.commands.thread_server import ThreadServer, run_thread_server
from tests.fakes import CARD, FakeGenerate, build_fake_app
from tests.image_files import make_png
from tests.terminal_process import CTRL_D, ENTER, TerminalProcess, make_environ

ESCAPE = "\x1b"


@pytest.fixture
def chat_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a chat in this process, at a terminal without a line editor. Returns what is written
    before the first prompt, and after each line that is typed at a prompt."""

    def chat(*arguments: str, lines: Sequence[str]) -> list[str]:
        monkeypatch.setattr(sys, "stdin", FakeTerminal("".join(f"{line}\n" for line in lines)))
        out = FakeTerminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        assert cli.main(["run", *arguments, "--no-history"]) == 0
        return out.getvalue().split(">>> ")

    return chat


def ask(terminal: TerminalProcess, text: str) -> str:
    """Types a line at the prompt. Returns the output until the next prompt."""
    terminal.type(text + ENTER)
    return terminal.read_until(">>> ")


def test_a_missing_model_is_downloaded_after_yes(
    chat_here: Callable[..., list[str]], own_engines: OwnEngines, hub_endpoint: str
):
    [start, _] = chat_here("org/tiny", "--port", "0", lines=["y"])
    assert "download org/tiny (59.2 kB)? [y/N] " in start
    assert start.endswith("org/tiny: type a message, /? for help, Ctrl-D to exit.\n")
    assert own_engines.ended == ["org/tiny"]


def test_commands(chat_here: Callable[..., list[str]], server: ThreadServer):
    expected = {
        "/?": "/set system TEXT",
        "/set parameter temperature 0.5": "Set temperature to 0.5.",
        "/set top_k 3": "Set top_k to 3.",
        "/set temperature 9": "temperature must be a number from 0 to 2, not 9",
        "/set parameter temperatur 1": "did you mean temperature?",
        "/sho": "unknown command /sho; did you mean /show?",
        "/show": "context       2048 tokens",
        "/show parameters": "temperature                    0.5",
        "/set system Be brief.": "Set the system message.",
        "/show system": "Be brief.",
        "/load builtin": "Loaded builtin.",
        "/set format": "mlxrunner: which format?",
        "/set format json": "Set the format to json.",
        "/set noformat": "Removed the format.",
        "/set verbose": "Set verbose.",
        "Hello": "eval rate:",
    }
    [_, *replies, last] = chat_here(*("builtin", *server.arguments), lines=[*expected, "/bye"])
    for (line, text), reply in zip(expected.items(), replies, strict=True):
        assert text in reply, line
    assert last == ""


def test_an_image_is_sent_with_the_next_message(
    chat_here: Callable[..., list[str]], tmp_path: Path
):
    """A dropped file is its path; the text after it is the message."""
    image, text = tmp_path / "a cat.png", tmp_path / "a.png"
    image.write_bytes(make_png(5))
    text.write_text("no image")
    generate = FakeGenerate()
    with serve_app(build_fake_app(generate, Settings())) as url:
        port = url.rpartition(":")[2]
        expected = {
            "/image": "which image? /image FILE",
            f"/image {tmp_path}/b.png": "cannot be read: No such file",
            f"/image {text}": "is not an image in a known format",
            f"/image {image}": "The next message has the image a cat.png.",
            f"'{image}' what?": "The next message has the image a cat.png.",
            f"{str(image).replace(' ', chr(92) + ' ')} and?": "The next message has the image",
            "/save pictures": "cannot contain the images of this conversation: /clear it",
        }
        lines = [*expected, "/bye"]
        [_, *replies, _] = chat_here(CARD.id, "--port", port, lines=lines)
    for (line, reply), shown in zip(expected.items(), replies, strict=True):
        assert reply in shown, line
    prompts = [request.prompt for request in generate.opened]
    sent = [prompt.messages[-1] for prompt in prompts if isinstance(prompt, Conversation)]
    assert [(one.content, len(one.images)) for one in sent] == [("what?", 2), ("and?", 1)]


def test_one_word_that_is_no_model_gets_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`mlxrunner run hello` only printed where it had looked for a model called hello."""
    monkeypatch.setattr(sys, "stdin", FakeTerminal())
    monkeypatch.setattr(sys, "stdout", FakeTerminal())
    assert cli.main(["run", "hello", "--port", "0"]) == 1
    err = capsys.readouterr().err
    assert "mlxrunner: model hello was not found: " in err
    assert err.endswith("; a prompt of one word follows the model: `mlxrunner run builtin hello`\n")


def test_a_saved_chat_is_a_model(
    chat_here: Callable[..., list[str]],
    server: ThreadServer,
    own_engines: OwnEngines,
):
    expected = {
        "/save": "mlxrunner: under which name? /save NAME",
        "/save a b": "'a b' is not a name",
        "/set system Be brief.": "",
        "/set repetition_penalty 1.5": "",
        "/set max_tokens 9": "",
        '/set stop "x"': "",
        QUESTION: "",
        "/save poet": "Saved this chat as poet: /load poet or `",
        "/save  poet": "poet exists: choose another name",
        # the server of the test does not serve it, so the chat loads it itself
        "/load poet": "Loaded poet.",
        "/show system": "Be brief.",
        "Hello": "",
        "/save poet:v2": "Saved this chat as poet:v2",
    }
    [_, *replies, last] = chat_here(*("builtin", *server.arguments), lines=[*expected, "/bye"])
    for (line, text), reply in zip(expected.items(), replies, strict=True):
        assert text in reply, line
    assert last == ""
    assert own_engines.ended == ["poet"]
    poet = store.find("poet")
    assert poet.system_prompt == "Be brief."
    config = {"repetition_penalty": 1.5, "max_new_tokens": 9, "stop_strings": ["x"]}
    assert config.items() <= poet.generation_config.items()
    [first, second] = poet.first_messages
    assert first == ("user", QUESTION)
    assert second[0] == "assistant"
    assert [role for role, _ in store.find("poet:v2").first_messages] == [
        *("user", "assistant", "user", "assistant")
    ]


def test_a_chat_with_another_machine_is_saved_there(monkeypatch: pytest.MonkeyPatch):
    """The other machine is simulated by a server on this one."""
    recipe = ModelRecipe(
        name="poet",
        base=None,
        system="Rhyme.",
        messages=(("user", "a"),),
        parameters={"seed": 1},
    )
    monkeypatch.setattr(chat_engine, "is_local", lambda settings: False)
    with run_thread_server(installed=True) as server:
        configuration = resolve_config({}, None, {"MLXRUNNER_PORT": server.port})
        with ChatEngine(configuration) as engine:
            endpoint = engine.connect(ModelSettings(name="builtin"))
            assert engine.save(endpoint, recipe) == "poet"
            with pytest.raises(AppError, match="poet exists"):
                engine.save(endpoint, recipe)
            endpoint = engine.connect(ModelSettings(name="poet"))
            engine.save(endpoint, replace(recipe, name="poet:v2", system=None))
    saved = store.find("poet:v2")
    assert saved.system_prompt == "Rhyme."
    assert saved.first_messages == (("user", "a"), ("user", "a"))


def test_several_lines_between_fences_are_one_message(
    chat_here: Callable[..., list[str]], server: ThreadServer
):
    [_, answer, text, said, system, _] = chat_here(
        *("builtin", *server.arguments),
        lines=[
            *('"""What is', 'mlxrunner?"""'),
            # a message and no command
            '"""/usr/bin"""',
            *('/set system """Be', 'brief."""'),
            "/show system",
        ],
    )
    # a slow machine shows the progress of the prompt in between
    assert answer.startswith("... ")
    assert answer.endswith(f"{ANSWER}\n")
    assert "unknown command" not in text
    assert said == "... Set the system message.\n"
    assert system == "Be\nbrief.\n"


@pytest.mark.parametrize("arguments", [(), ("--no-history",)])
def test_the_history_is_kept_unless_it_is_turned_off(
    runner: Runner, server: ThreadServer, arguments: tuple[str, ...]
):
    with runner.open("builtin", *server.arguments, *arguments) as terminal:
        terminal.read_until(">>> ")
        ask(terminal, "/set verbose")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert runner.history_file.exists() == (not arguments)
    if not arguments:
        assert runner.history_file.read_text().splitlines()[-1] == "/set verbose"
        assert runner.history_file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("variables", "escapes"), [({"TERM": "dumb"}, set()), ({"NO_COLOR": "1"}, {"[?2004"})]
)
def test_without_color_there_are_no_escape_sequences_but_those_of_pasting(
    runner: Runner, server: ThreadServer, variables: dict[str, str], escapes: set[str]
):
    with runner.open("builtin", *server.arguments, "--verbose", **variables) as terminal:
        terminal.read_until(">>> ")
        assert ANSWER in ask(terminal, QUESTION)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert set(re.findall(f"{ESCAPE}([^hl]*)[hl]?", terminal.output)) == escapes


PASTES = {
    "several lines": ("First line\n/bye\n\nlast line", None),
    "a path on the first line": ("/usr/bin\n/usr/lib", None),
    "quotes of a program": ('"""What it does."""\nprint("""x""")\n', None),
    "a text in quotes": ('"""one\ntwo"""', "one\ntwo"),
}


def test_pasted_lines_are_one_message(runner: Runner):
    """Each line was a message, since the editor of some distributions does not ask the terminal to
    mark pasted text."""
    generate = FakeGenerate(cards=(replace(CARD, id="builtin"),))
    with (
        serve_app(build_fake_app(generate, Settings())) as url,
        runner.open("builtin", *ThreadServer(url).arguments) as terminal,
    ):
        terminal.read_until(">>> ")
        for count, (name, (text, expected)) in enumerate(PASTES.items(), 1):
            terminal.paste(text)
            terminal.type(ENTER)
            terminal.read_until("Hello")
            terminal.read_until(">>> ")
            assert len(generate.opened) == count, name
            conversation = generate.opened[-1].prompt
            assert isinstance(conversation, Conversation)
            content = conversation.messages[-1].content
            assert content == (text if expected is None else expected), name
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


# `input` and the module `readline` of a Python that was built with libedit
LIBEDIT_PROGRAM = """
import builtins, ctypes, types
from app.commands import chat
libedit = ctypes.CDLL("libedit.so.2")
libedit.readline.restype = ctypes.c_void_p
ctypes.CDLL(None).setlocale(6, b"C.UTF-8")
libedit.rl_initialize()
def read_line(prompt=""):
    line = libedit.readline(prompt.encode())
    if line is None:
        raise EOFError
    return ctypes.string_at(line).decode()
builtins.input = read_line
module = types.ModuleType("readline", "a wrapper of libedit")
module.parse_and_bind = lambda text: libedit.rl_parse_and_bind(text.encode())
read = chat._enable_paste(module)
while (line := read(">>> ")) != "/bye":
    print("read", ascii(line), flush=True)
"""


@pytest.mark.skipif(find_library("edit") is None, reason="libedit is not installed")
def test_pasted_lines_are_one_message_with_libedit():
    """The line editor of Apple's Python and of uv's. It knows no bracketed paste."""
    command = [sys.executable, "-c", LIBEDIT_PROGRAM]
    with TerminalProcess(command, environ=make_environ(LC_ALL="C.UTF-8")) as terminal:
        terminal.read_until(">>> ")
        terminal.type("before ")
        terminal.paste("one\n/bye\n")
        terminal.type(f"two{ENTER}")
        terminal.wait_for(r"read 'before one\\n/bye\\ntwo'\r\n>>> ")
        terminal.type(f"/bye{ENTER}")
        assert terminal.wait() == 0
