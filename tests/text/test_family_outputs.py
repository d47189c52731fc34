"""The properties of the outputs of every family: markers are never shown, a call ends reasoning
that was not closed, and arguments that models write with the usual errors are valid JSON."""

import json
from collections.abc import Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from app.grammar.constraint import ReasoningTags
from app.text.family import ChatFamily, load_families
from app.text.generic_tool_calls import GenericFamily
from app.text.syntax.output_parser import OutputPart
from tests.rows import rows
from tests.text.families.reading import (
    check_text,
    collect_calls,
    join_content,
    join_reasoning,
    merge_pieces,
    random_chunks,
)
from tests.text.families.samples import SAMPLES, WITHOUT_REASONING, load_family
from tests.text.families.walking import NOW, WEATHER

TOOLS = (WEATHER, NOW)
MODULES = sorted(SAMPLES)
REASONING = sorted(set(MODULES) - set(WITHOUT_REASONING))
# the template that makes a family reason, where it depends on the template
TEMPLATE = "<think></think><|channel>[THINK]"

# parts of outputs in any order; the rest are the markers and a call of the family
_TEXTS = (
    "Hello",
    "two words ",
    " ",
    "\n",
    "\n\n",
    '{"city": "Oslo"}',
    "{}",
    "now",
    "assistant",
    "[",
)


def find_tags(family: ChatFamily) -> ReasoningTags:
    tags = family.reasoning_tags(TEMPLATE)
    assert tags is not None
    return tags


def test_each_family_has_a_sample() -> None:
    assert sorted(load_families()) == MODULES
    for module in MODULES:
        pieces = check_text(load_family(module), SAMPLES[module], tools=TOOLS)
        assert [(call.name, json.loads(call.arguments)) for call in collect_calls(pieces)] == [
            ("get_weather", {"city": "Oslo"})
        ], module
        assert join_content(pieces) == "", module


def parse(
    family: ChatFamily,
    chunks: Collection[str],
    tags: ReasoningTags | None,
    special_tokens: Collection[str],
    *,
    tools: bool,
    in_reasoning: bool,
) -> list[OutputPart]:
    parser = family.build_parser(
        tools=TOOLS if tools else (),
        tags=tags,
        in_reasoning=in_reasoning,
        special_tokens=special_tokens,
    )
    return [part for chunk in chunks for part in parser.feed(chunk)] + parser.flush()


@given(data=st.data(), reasons=st.booleans(), in_reasoning=st.booleans(), tools=st.booleans())
@settings(max_examples=400)
def test_special_tokens_are_never_part_of_a_text(
    data: st.DataObject, reasons: bool, in_reasoning: bool, tools: bool
) -> None:
    """Random walks over the markers of each family, in and out of order, also of a family that is
    used through plain JSON."""
    module = data.draw(st.sampled_from(MODULES))
    family = load_family(module)
    if data.draw(st.booleans()):
        family = GenericFamily(family)
    tags = find_tags(family) if reasons else None
    edges = () if tags is None else (tags.open, tags.close)
    markers = {*family.markers, *(edge.strip() for edge in edges)}
    parts = st.sampled_from((*family.markers, *edges, SAMPLES[module], *_TEXTS))
    text = "".join(data.draw(st.lists(parts, max_size=10)))
    kwargs = {"tools": tools, "in_reasoning": in_reasoning and reasons}
    found = parse(family, [text], tags, markers, **kwargs)
    for shown in (join_content(found), join_reasoning(found)):
        assert not [marker for marker in markers if marker in shown], (module, text)
    for chunks in (list(text), *random_chunks(text, times=2)):
        assert merge_pieces(parse(family, chunks, tags, markers, **kwargs)) == merge_pieces(found)


@rows("module", [module for module in MODULES if load_family(module).markers])
def test_markers_that_look_like_special_tokens_are_hidden_with_any_tokenizer(module: str) -> None:
    family = load_family(module)
    marks = [mark for mark in family.markers if "|" in mark or "｜" in mark]
    for tools in ((), TOOLS):
        text = "a ".join(("", *marks, *reversed(marks), ""))
        pieces = check_text(family, text, tools=tools, tags=find_tags(family))
        shown = join_content(pieces) + join_reasoning(pieces)
        assert not [mark for mark in marks if mark in shown], shown


def test_a_marker_that_is_ordinary_text_stays_in_the_text() -> None:
    """The tokenizer has no such token, and the model explains the syntax, for example."""
    family = load_family("hermes")
    text = "Write <tool_call> and <think> in a regex."
    assert join_content(check_text(family, text, tools=TOOLS, tags=find_tags(family))) == text


@rows("module", REASONING)
def test_a_call_ends_reasoning_that_was_not_closed(module: str) -> None:
    """The session ended there: the call was part of the reasoning, and nothing was called."""
    family = load_family(module)
    tags = find_tags(family)
    apart = "" if SAMPLES[module].startswith("<|start|>") else family.reasoning_separator
    for opened, end in ((False, ""), (True, ""), (True, f"\n{tags.close.strip()}\n\n")):
        text = f"{'' if opened else tags.open}I should look.\n{apart}{SAMPLES[module]}{end}"
        pieces = check_text(family, text, tools=TOOLS, tags=tags, in_reasoning=opened)
        assert (join_reasoning(pieces), join_content(pieces)) == ("I should look.", ""), text
        assert [call.name for call in collect_calls(pieces)] == ["get_weather"], text


@rows("module", REASONING)
def test_without_tools_a_call_does_not_end_reasoning(module: str) -> None:
    family = load_family(module)
    tags = find_tags(family)
    if module in ("harmony", "glimmer"):  # their calls are messages
        return
    text = f"I should look. {SAMPLES[module]} Or not.{tags.close}Done."
    pieces = check_text(family, text, tools=(), tags=tags, in_reasoning=True)
    assert join_content(pieces) == "Done."
    assert join_reasoning(pieces).startswith("I should look.")
    assert join_reasoning(pieces).endswith("Or not.")
    assert collect_calls(pieces) == []


@rows("module", [module for module in REASONING if load_family(module).call_markers])
def test_a_marker_without_a_call_does_not_end_reasoning(module: str) -> None:
    """Models reason about the syntax that their prompt describes."""
    family = load_family(module)
    tags = find_tags(family)
    text = f"I could use {family.call_markers[0]} here.{tags.close}"
    pieces = check_text(family, text, tools=TOOLS, tags=tags, in_reasoning=True)
    assert join_content(pieces) == ""
    assert join_reasoning(pieces).startswith("I could use")
    assert join_reasoning(pieces).endswith("here.")


@rows("module", REASONING)
def test_a_grammar_for_calls_keeps_them_out_of_the_reasoning(module: str) -> None:
    """A call in the reasoning would bypass the schema, because the grammar begins after it."""
    family = load_family(module)
    tags = find_tags(family)
    if module in ("harmony", "glimmer"):  # their calls are messages
        return
    parser = family.build_parser(
        tools=TOOLS, tags=tags, in_reasoning=True, calls_end_reasoning=False
    )
    pieces = [*parser.feed(f"I should look. {SAMPLES[module]}"), *parser.flush()]
    assert collect_calls(pieces) == []


@rows("module", MODULES)
def test_white_space_around_a_call_is_kept(module: str) -> None:
    """The words before and after a call were joined."""
    text = f"First.\n\n{SAMPLES[module]}\n\nSecond. "
    pieces = check_text(load_family(module), text, tools=TOOLS)
    assert [call.name for call in collect_calls(pieces)] == ["get_weather"]
    first, space, second = join_content(pieces).partition("\n")
    assert (first, (space + second).strip()) == ("First.", "Second.")
    assert second.endswith("Second. ")


_PATHS = st.lists(
    st.sampled_from(("\\d+", "\\s", "C:\\Users\\x", "\\.", "\\(", "x", " ")), max_size=6
)


@given(module=st.sampled_from(MODULES), text=_PATHS.map("".join))
@settings(max_examples=200)
def test_a_backslash_that_escapes_nothing_is_a_backslash(module: str, text: str) -> None:
    """The call took the brace after its own, and its arguments were not JSON."""
    value = f"{text}x"
    output = SAMPLES[module].replace("Oslo", value) + "\n"
    pieces = check_text(load_family(module), output, tools=TOOLS)
    assert [json.loads(call.arguments) for call in collect_calls(pieces)] == [{"city": value}]
    assert join_content(pieces).strip() == ""


@rows("module", [module for module in MODULES if '{"city": "Oslo"}' in SAMPLES[module]])
def test_a_call_in_json_ends_at_its_own_brace(module: str) -> None:
    for written, expected in (
        ('{"city": "Oslo",}', '{"city": "Oslo"}'),
        ('{"city": Oslo}', '{"city": Oslo}'),
        ('{"city": "Oslo" "days": [3]}', '{"city": "Oslo" "days": [3]}'),
    ):
        output = SAMPLES[module].replace('{"city": "Oslo"}', written)
        pieces = check_text(load_family(module), output, tools=TOOLS)
        assert [call.arguments for call in collect_calls(pieces)] == [expected], output
        assert join_content(pieces) == "", output


_OBJECTS = ("apriel", "gigachat_31", "granite", "hermes", "jamba", "mistral_v3", "nemotron_v2")


@rows("module", [*_OBJECTS, "glm", "qwen_coder"])
def test_several_objects_in_one_frame_are_several_calls(module: str) -> None:
    family = load_family(module)
    one = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    two = '{"name": "now", "arguments": {}}'
    sample = SAMPLES[module]
    if module not in _OBJECTS:
        before, after = family.markers[:2]
        sample = f"{before}\n{one}\n{after}"
    frame = sample.replace(f"[{one}]", one).replace(f"[\n{one}\n]", one)
    for written in (f"[{one}, {two}]", f"{one}\n{two}", f"{one}, {two}", f"[{one} {two}]"):
        pieces = check_text(family, f"{frame.replace(one, written)} Done.", tools=TOOLS)
        assert [(call.name, call.arguments) for call in collect_calls(pieces)] == [
            ("get_weather", '{"city": "Oslo"}'),
            ("now", "{}"),
        ], written
        assert join_content(pieces) == "Done.", written
