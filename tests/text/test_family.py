"""Chat families: the family of a template, and common behavior."""

from pathlib import Path

from app.grammar.constraint import ReasoningTags
from app.text.family import ChatFamily, find_family, load_families
from tests.rows import rows
from tests.text.families.reading import check_text, join_content, join_reasoning
from tests.text.families.rows import roundtrip, templates

FAMILIES = load_families()
TAGS = ReasoningTags(open="<think>", close="</think>")

# these render tools, but no call syntax
WITHOUT_SYNTAX = {"llamacpp-ChatGLM4.jinja", "ortx-phi-4-mini-reasoning.jinja"}
# this one requires a message with a special role
REFUSING = {"hfjinja-fireworks-ai_firefunction-v1.jinja"}


def test_one_family_at_most_claims_a_template_and_one_if_it_renders_calls(shared):
    unclaimed = set()
    for name, source in templates(shared).items():
        # find_family raises if two families claim the template
        if find_family(source) is None and "tool_calls" in source:
            unclaimed.add(name)
    assert unclaimed == REFUSING
    for name in WITHOUT_SYNTAX:
        assert find_family(templates(shared)[name]) is None


def test_every_template_with_known_calls_is_claimed(shared):
    for row in roundtrip(shared, *templates(shared)):
        assert row.template is not None
        assert find_family(row.template) is not None, row.id


def test_no_family_claims_a_template_without_calls():
    assert find_family("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    assert find_family("") is None


@rows("name", FAMILIES)
def test_a_family_has_its_own_tests(name):
    module = type(FAMILIES[name]).__module__
    files = (Path(__file__).parent / "families").glob("test_*.py")
    tests = "".join(file.read_text("utf-8") for file in files)
    assert f'"{name}"' in tests or f"from {module} import Family" in tests


@rows("name", FAMILIES)
def test_a_family_has_markers(name):
    assert all(FAMILIES[name].markers)


@rows("name", FAMILIES)
def test_no_family_claims_a_text_with_think_tags_only(name):
    assert not FAMILIES[name].matches("{{ '<think>' }}{{ messages[0].content }}{{ '</think>' }}")


@rows(
    ("text", "in_reasoning", "expected_reasoning", "expected_content"),
    [
        ("<think>a</think>b", False, "a", "b"),
        ("\n<think>\na\n</think>\n\nb\n", False, "a", "b\n"),
        ("a</think>b", True, "a", "b"),
        ("\n<think>\na</think>b", True, "a", "b"),  # opened again
        ("a</think>b", False, "", "a</think>b"),
        ("b<think>a</think>", False, "", "b<think>a</think>"),  # only at the beginning
        ("<think>a", False, "a", ""),
        ("<think>a</thi", False, "a</thi", ""),
        ("<think></think>b", False, "", "b"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        (" b", False, "", " b"),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_in_tags_at_the_beginning(
    text, in_reasoning, expected_reasoning, expected_content
):
    pieces = check_text(ChatFamily(), text, tools=[], tags=TAGS, in_reasoning=in_reasoning)
    assert (join_reasoning(pieces), join_content(pieces)) == (expected_reasoning, expected_content)


def test_without_tags_all_is_text():
    pieces = check_text(ChatFamily(), "<think>a</think>b", tools=[])
    assert join_content(pieces) == "<think>a</think>b"


def test_a_prompt_opens_reasoning_where_it_ends_with_the_tag():
    family = ChatFamily()
    assert family.ends_in_reasoning("<|im_start|>assistant\n<think>\n", TAGS)
    assert not family.ends_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", TAGS)
    assert not family.ends_in_reasoning("<|im_start|>assistant\n", TAGS)


def test_a_template_that_closes_the_tag_supports_reasoning():
    assert ChatFamily().reasoning_tags("{{ content.split('</think>')[-1] }}") == TAGS
    assert ChatFamily().reasoning_tags("{{ content }}") is None
