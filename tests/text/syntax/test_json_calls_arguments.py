"""Arguments as JSON between markers."""

from app.text.family import ChatFamily
from app.text.syntax.json_calls import parse_json_arguments
from tests.rows import rows
from tests.text.families.reading import check_text, collect_calls, join_content


class Marked(ChatFamily):
    """One call of f; `.end` or `!` ends it."""

    def parse_tool_calls(self, reader, output, tools):
        output.start_tool_call("f")
        yield from parse_json_arguments(reader, output, ".end", "!")
        yield from reader.read_until(on_text=output.add_content)


@rows(
    ("text", "arguments", "rest"),
    [
        ('{"a": 1}!', '{"a": 1}', "!"),
        (' {"a": 1} .end', '{"a": 1}', ".end"),
        ('{"a": ".end!"}!', '{"a": ".end!"}', "!"),
        ('{"a": b} c!', '{"a": b}', "c!"),
        ('{"a": 1}} .enough!', '{"a": 1}', ".enough!"),
        ('{"a": {b}]}}!', '{"a": {b}]', "!"),
        ("print(1) !", "print(1) ", "!"),
        ("!", "{}", "!"),
        (" .end", "{}", ".end"),
        ("", "", ""),
        ('{"a": "b', '{"a": "b', ""),
        ('{"a": 1', '{"a": 1', ""),
    ],
)
def test_arguments_end_at_a_marker_outside_strings(text, arguments, rest):
    pieces = check_text(Marked(), text, tools=())
    assert [call.arguments for call in collect_calls(pieces)] == [arguments]
    assert join_content(pieces) == rest
