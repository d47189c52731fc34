"""A call's arguments as JSON text between markers, where the name stands outside of it.

Knows: what becomes of arguments that are not the JSON they should be. Must not know: any family's
markers.
"""

from app.text.syntax.json_reader import parse_json_value
from app.text.syntax.pieces import OutputBuilder
from app.text.syntax.reader import Reader, Resumable


def parse_json_arguments(
    reader: Reader, output: OutputBuilder, *ends: str
) -> Resumable[str | None]:
    """Hand on the arguments of the call that was just begun, up to one of these markers, which is
    not taken. Which it is; None where the text ends without one.

    A marker within a JSON string is no end. What is no JSON, or stands behind it, is handed on as
    it is, so that nothing of it is lost. Nothing at all is the empty object.
    """

    def take(text: str, at: int) -> None:
        output.add_arguments(text)

    yield from reader.skip_space()
    met = yield from reader.peek_any(*ends)
    if met is not None:
        output.add_arguments("{}")
        return met
    if (yield from parse_json_value(reader, take)) == "whole":
        yield from reader.skip_space()
    return (yield from reader.read_before(*ends, on_text=take))
