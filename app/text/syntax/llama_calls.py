"""What Llama's models write when they call, whichever way they were asked to.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}
    [get_weather(city="Oslo")]
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}
    <|python_tag|>brave_search.call(query="Oslo")

Knows: that without the token a call is the beginning of the answer, and then only what names a tool
is one. Must not know: which template asks for what.

Source: Meta's documentation of the prompts of Llama 3.1 to 4, and its chat templates. These know
one call a turn; models that make more put a semicolon, a comma or the end of a line between them.
"""

from collections.abc import Collection, Sequence
from functools import partial

from app.core.requests import Tool
from app.text.syntax.call_object import Outcome, call_object
from app.text.syntax.marked_calls import marked_call
from app.text.syntax.pieces import Pieces
from app.text.syntax.python_calls import python_call, python_list
from app.text.syntax.reader import Reader, Wait

TAG, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"


def llama_calls(reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
    """Read an answer to its end."""
    names = {tool.name for tool in tools}
    marks = (TAG, START) if tools else ()
    if tools:
        yield from _leading(reader, pieces, names)
    while mark := (yield from reader.until(*marks, take=pieces.say)):
        read = partial(_behind_tag, names=names)
        yield from marked_call(reader, pieces, read=read, open=mark, close=END, ends=marks)
        yield from _leading(reader, pieces, names)


def _leading(reader: Reader, pieces: Pieces, names: Collection[str]) -> Wait[None]:
    """Calls that stand here, one behind the other."""
    while True:
        start = reader.hold()
        yield from reader.space()
        yield from reader.accept(";", ",")
        outcome = yield from _bare(reader, pieces, names)
        if outcome == "none":
            reader.rewind(start)
            return
        if outcome == "broken":
            yield from reader.before(TAG, START, take=lambda text, _: pieces.arguments(text))
        pieces.mark()


def _bare(reader: Reader, pieces: Pieces, names: Collection[str]) -> Wait[Outcome]:
    yield from reader.space()
    if (yield from reader.peek()) == "[":
        return (yield from python_list(reader, pieces, names=names))
    return (yield from call_object(reader, pieces, names=names))


def _behind_tag(reader: Reader, pieces: Pieces, *, names: Collection[str]) -> Wait[Outcome]:
    yield from reader.space()
    match (yield from reader.peek()):
        case "{":
            return (yield from call_object(reader, pieces))
        case "[":
            return (yield from python_list(reader, pieces))
        case _:
            # code for an interpreter may stand here just as well
            return (yield from python_call(reader, pieces, names=names, method=".call"))
