"""The output of Functionary 2.2 and 3.2 has parts, each addressed to `all` or to a function.

    all
    Let me see.
    >>>get_weather
    {"city": "Oslo"}

Functionary 3.1 writes the arguments of a tool call as JSON in a tag with the name of the function.
Llama 3.1 uses the same format for custom functions. The token `<|python_tag|>` is followed by the
arguments of a function named python.

    <function=get_weather>{"city": "Oslo"}</function>

Knows: the separators between the parts, the tags, the token for Python code. Must not know: the
JSON parser.

Source: MeetKai's chat templates of Functionary medium v2.2, v3.1 and v3.2. With 2.2 and 3.2, the
prompt ends directly before the first recipient.
"""

import re
from collections.abc import Collection, Sequence

from app.core.requests import Tool
from app.grammar.constraint import MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.family import ChatFamily
from app.text.syntax.json_calls import CallOutcome, parse_json_arguments
from app.text.syntax.json_reader import parse_json_to_own_bracket
from app.text.syntax.marked_calls import parse_marked_call
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import OnText, Reader, Resumable

_ALL = "all"
_WORD = re.compile(r"[^\s<>]+")

_OPEN, _CLOSE = "<function=", "</function>"
_PYTHON = "<|python_tag|>"
_TAGGED_NAME = re.compile(r"[^\s<>{]+")


class _RecipientFamily(ChatFamily):
    """Parses and constrains outputs with recipients. separator: the text before each recipient
    except the first. gap: the white space before the separator. opening: the text after a
    recipient."""

    separator: str
    gap: str = ""
    opening: str

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        names = {_ALL, *(tool.name for tool in tools)}
        start = reader.hold()
        to = yield from self._parse_recipient(reader, names)
        if to is None:
            reader.rewind(start)
        else:
            reader.release()
            output.add_marker()
        part: str | None = to or _ALL
        while part is not None:
            take = output.add_content
            if part != _ALL:
                take = yield from _parse_call(reader, output, part)
            part = yield from self._parse_part(reader, output, names, take)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            calls=tuple(
                f"{literal(tool.name + self.opening)} {json_schema(tool)}" for tool in tools
            ),
            between=literal(self.gap + self.separator),
        )

    def _parse_part(
        self, reader: Reader, output: OutputBuilder, names: Collection[str], on_text: OnText
    ) -> Resumable[str | None]:
        """Parses one part. Returns the recipient of the next part, or None if there is none."""
        while (yield from reader.read_until(self.separator, on_text=on_text)) is not None:
            inside = reader.hold()
            to = yield from self._parse_recipient(reader, names)
            if to is not None:
                reader.release()
                output.add_marker()
                return to
            reader.rewind(inside)
            on_text(self.separator, inside - len(self.separator))
        return None

    def _parse_recipient(self, reader: Reader, names: Collection[str]) -> Resumable[str | None]:
        word = yield from reader.match(_WORD)
        if word not in names:
            return None
        reader.take(len(word))
        return None if (yield from reader.accept(self.opening)) is None else word


class _FunctionaryV22(_RecipientFamily):
    template_marks = ("<|recipient|>", "<|content|>")
    markers = ("<|from|>", "<|recipient|>", "<|content|>")
    separator = "<|from|>assistant\n<|recipient|>"
    gap = "\n"
    opening = "\n<|content|>"
    content_prefix = f"{_ALL}{opening}"


class _FunctionaryV31(ChatFamily):
    template_marks = (f'{_OPEN}example_function_name>{{"',)
    markers = (_PYTHON,)
    call_markers = (_OPEN, _PYTHON)

    def parse_call(
        self,
        reader: Reader,
        output: OutputBuilder,
        tools: Sequence[Tool],
        mark: str,
        on_text: OnText,
    ) -> Resumable[bool]:
        return (
            yield from parse_marked_call(
                reader,
                output,
                parse=_parse_python_call if mark == _PYTHON else _parse_tagged_call,
                open=mark,
                ends=self.call_markers,
                on_text=on_text,
            )
        )

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return ToolCallGrammar(
            calls=tuple(
                f"{literal(f'{_OPEN}{tool.name}>')} {json_schema(tool)} {literal(_CLOSE)}"
                for tool in tools
            ),
            between="",
            trigger=_OPEN,
        )


class _FunctionaryV32(_RecipientFamily):
    template_marks = (">>>all",)
    separator = ">>>"
    opening = "\n"
    content_prefix = f"{_ALL}{opening}"


FAMILIES = {
    "functionary_v22": _FunctionaryV22(),
    "functionary_v31": _FunctionaryV31(),
    "functionary_v32": _FunctionaryV32(),
}


def _parse_call(reader: Reader, output: OutputBuilder, name: str) -> Resumable[OnText]:
    """Starts a call. Returns a callback that adds text to its arguments."""

    def take(text: str, at: int) -> None:
        output.add_arguments(text)

    output.start_tool_call(name)
    if (yield from parse_json_to_own_bracket(reader, take)) == "complete":
        yield from reader.skip_space()
    return take


def _parse_tagged_call(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    name = yield from reader.match(_TAGGED_NAME)
    reader.take(len(name))
    if not name or (yield from reader.accept(">")) is None:
        return "none"
    output.start_tool_call(name)
    reader.release()
    yield from parse_json_arguments(reader, output, _CLOSE, _OPEN, _PYTHON)
    yield from reader.accept(_CLOSE)
    return "complete"


def _parse_python_call(reader: Reader, output: OutputBuilder) -> Resumable[CallOutcome]:
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        return "none"
    output.start_tool_call("python")
    reader.release()
    end = yield from parse_json_to_own_bracket(reader, lambda text, _: output.add_arguments(text))
    return "complete" if end == "complete" else "broken"
