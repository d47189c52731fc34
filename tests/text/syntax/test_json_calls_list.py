"""Tool calls written as one JSON array."""

from app.text.syntax.json_calls import CallOutcome, parse_call_list
from app.text.syntax.output_parser import OutputBuilder
from app.text.syntax.reader import Reader, Resumable
from tests.rows import rows
from tests.text.families.reading import collect_calls
from tests.text.syntax.test_reader import run


def parse_list(*chunks: str) -> tuple[CallOutcome, list[str], str]:
    """The outcome, the calls as `name(arguments)`, and the rest of the text."""
    pieces = OutputBuilder()

    def parse(reader: Reader) -> Resumable[CallOutcome]:
        start = reader.hold()
        outcome = yield from parse_call_list(reader, pieces)
        if outcome == "none":
            reader.rewind(start)
        reader.release()
        return outcome

    outcome, rest = run(chunks, parse)
    return (
        outcome,
        [f"{call.name}({call.arguments})" for call in collect_calls(pieces.drain())],
        rest,
    )


F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g"}'


@rows(
    ("text", "expected"),
    [
        (f"[{F}]", ("complete", ['f({"a": 1})'], "")),
        (f" [ {F} ,\n{G}\n] !", ("complete", ['f({"a": 1})', "g({})"], " !")),
        ("[]", ("none", [], "[]")),
        ("[1]", ("none", [], "[1]")),
        (F, ("none", [], F)),
        ('[{"name": "f"', ("none", [], '[{"name": "f"')),
        # invalid text after a call is left over
        (f"[{F}, 1]", ("complete", ['f({"a": 1})'], ", 1]")),
        (f"[{F} {G}]", ("complete", ['f({"a": 1})', "g({})"], "")),
        (f"[{F},]", ("complete", ['f({"a": 1})'], ",]")),
        (f"[{F}", ("complete", ['f({"a": 1})'], "")),
        ('[{"name": "f", "arguments": {oh}}]', ("complete", ["f({oh})"], "")),
        (f'[{G}, {{"name": "f", "arguments": [', ("broken", ["g({})", "f([)"], "")),
    ],
)
def test_lists_of_calls_are_parsed(text, expected):
    assert parse_list(text) == expected
    assert parse_list(*text) == expected
