"""Images in prompts, with the published templates: each image of a request is in the prompt at its
place, or the request is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.errors import AppError
from app.core.images import Image, PlacedImage, split_parts
from app.core.requests import Conversation, GenerateRequest, Message
from app.images.plan import ImagePlan, ImageProcessor, Resize, Tile
from app.serving.image_input import get_image
from app.text.generated_turns import GeneratedTurns, TurnRecorder
from app.text.prompt import PromptBuilder, RenderedPrompt
from tests.image_files import make_image
from tests.text.templates import (
    MADE_FOR_OTHER_CONVERSATIONS,
    SYSTEM,
    TOKENIZER,
    WEATHER,
    calls,
    make_files,
)

FOLDER = Path(__file__).parents[3] / "shared/data/chat_templates"

# the marks that templates write for an image
MARKS = ("<|image_pad|>", "<start_of_image>", "<|image|>", "[IMG]", "<image>", "<|media_pad|>")

SIMPLE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<v><pad></v>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}</e>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRINGS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</e>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ONLY_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'image' %}<pad>{% elif p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}</e>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Processor:
    """One that gives an image a token for each pixel of its width."""

    version = "1"

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def plan(self, image: Image) -> ImagePlan:
        resize = Resize(width=image.width, height=image.height, filter="bicubic")
        return ImagePlan(
            tiles=(Tile(resizes=(resize,)),),
            grid=(1, image.width),
            text=f"({self.mark * image.width})",
            token=self.mark,
            num_tokens=image.width,
            version=self.version,
        )


def make_builder(
    template: str, mark: str = "<pad>", turns: GeneratedTurns | None = None
) -> PromptBuilder:
    processor: ImageProcessor = Processor(mark)
    return PromptBuilder(make_files(template), TOKENIZER, turns, ["</e>"], processor)


def message(role: str, *parts: str | int, call: str = "") -> Message:
    """A message of texts, and of images that are as wide as the numbers."""
    content, images = "", list[PlacedImage]()
    for part in parts:
        if isinstance(part, int):
            images.append(PlacedImage(offset=len(content), image=make_image(part)))
        else:
            content += part
    return Message(role=role, content=content, images=tuple(images), tool_call_id=call or None)


def build(builder: PromptBuilder, *messages: Message, tools: bool = False) -> RenderedPrompt:
    request = GenerateRequest(model="small", prompt="", tools=(WEATHER,) if tools else ())
    return builder.build(request, Conversation(messages=messages), needs_message_ends=True)


def find_images(prompt: RenderedPrompt) -> list[int]:
    """Returns the widths of the images, whose text must be at their positions."""
    for one in prompt.images:
        assert prompt.text.startswith(one.plan.text, one.start)
    return [one.image.width for one in prompt.images]


def test_an_image_is_at_its_place_between_texts():
    prompt = build(make_builder(SIMPLE), message("user", "one", 2, "two", 3, 1))
    assert (
        prompt.text
        == "<user>one<v>(<pad><pad>)</v>two<v>(<pad><pad><pad>)</v><v>(<pad>)</v></e><assistant>"
    )
    assert find_images(prompt) == [2, 3, 1]
    assert all(0 < end <= len(prompt.text) for end in prompt.message_ends)


def test_a_template_for_texts_gets_the_mark_in_the_text():
    prompt = build(make_builder(STRINGS), message("user", "one", 2, "two"))
    assert prompt.text == "<user>one(<pad><pad>)two</e><assistant>"


def test_a_template_that_reads_lists_only_gets_lists_only():
    builder = make_builder(ONLY_PARTS)
    prompt = build(builder, message("system", "s"), message("user", "one", 2, "two"))
    assert prompt.text == "<system>s</e><user>one(<pad><pad>)two</e><assistant>"


def test_the_text_of_an_image_comes_from_the_template_for_roles_that_have_no_lists():
    template = SIMPLE.replace("m.content is string", "m.content is string or m.role == 'tool'")
    messages = (
        message("user", "q"),
        calls("Oslo"),
        message("tool", "r", 2, call=calls("Oslo").tool_calls[0].id),
    )
    prompt = build(make_builder(template), *messages)
    assert "r<v>(<pad><pad>)</v>" in prompt.text


def test_a_mark_in_a_text_is_no_image():
    """The template renders each mark as private use characters, which text may also contain."""
    text = "see <pad> \uf8f1\uf8f2\uf8f3<pad>\uf8f1\uf8f2"
    messages = (message("system", "<pad>"), message("user", text, 2, "<pad>"))
    prompt = build(make_builder(SIMPLE), *messages)
    assert prompt.text == (f"<system><pad></e><user>{text}<v>(<pad><pad>)</v><pad></e><assistant>")
    assert find_images(prompt) == [2]


def test_a_template_that_drops_an_image_refuses_the_request():
    template = STRINGS.replace("{{ m.content }}", "{{ m.content | replace('<pad>', '') }}")
    with pytest.raises(AppError, match="renders 0 of the 1 images") as caught:
        build(make_builder(template), message("user", "one", 2))
    assert caught.value.param == "image"


def test_images_keep_their_places_in_messages_that_are_joined():
    """The template rejects consecutive messages of the user."""
    template = (
        "{% for m in messages %}{% if loop.index0 and messages[loop.index0 - 1].role == m.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + SIMPLE
    )
    prompt = build(
        make_builder(template),
        message("user", "a", 1, "b"),
        message("user", 2, "c"),
        message("user", 3),
    )
    assert find_images(prompt) == [1, 2, 3]
    assert "a<v>(<pad>)</v>b\n\n<v>(<pad><pad>)</v>c\n\n<v>" in prompt.text


def test_the_message_ends_are_positions_in_the_expanded_prompt():
    messages = (
        message("user", 3, "a"),
        Message(role="assistant", content="A"),
        message("user", 9, "b"),
    )
    with_images = build(make_builder(SIMPLE), *messages)
    ends = [with_images.text[:end] for end in with_images.message_ends]
    assert any(end.endswith("<assistant>A</e>") for end in ends)
    assert any(end.endswith("b</e>") for end in ends)


def test_a_turn_is_restored_only_after_the_same_images():
    turns = GeneratedTurns()
    builder = make_builder(SIMPLE, turns=turns)
    question = message("user", 2, "a")
    prompt = build(builder, question)
    recorder = TurnRecorder(
        turns,
        "",
        prompt_length=prompt.digested_length,
        prompt_digest=prompt.digest,
        context_ids=[0],
    )
    for id_ in TOKENIZER.encode(" A ", add_special_tokens=False):
        recorder.feed(id_, [])
    recorder.finish([])

    def ask_again(width: int) -> str:
        first = message("user", width, "a")
        return build(builder, first, Message(role="assistant", content=""), message("user", 4)).text

    assert "<assistant> A </e>" in ask_again(2) or "<assistant></e>" in ask_again(2)
    assert "<assistant></e>" in ask_again(3)


def read_templates() -> Sequence[tuple[str, str, str]]:
    """The published templates that have a mark: name, source and mark."""
    found: list[tuple[str, str, str]] = []
    for path in sorted(FOLDER.glob("templates*/*.jinja")):
        source = path.read_text("utf-8")
        mark = next((mark for mark in MARKS if mark in source), None)
        if mark is not None and path.name not in MADE_FOR_OTHER_CONVERSATIONS:
            found.append((path.name, source, mark))
    return found


TEMPLATES = read_templates()


@pytest.mark.skipif(not TEMPLATES, reason="needs the published templates")
@pytest.mark.parametrize(
    ("name", "source", "mark"), TEMPLATES, ids=[name for name, *_ in TEMPLATES]
)
def test_every_image_is_in_the_prompt_of_a_published_template_or_the_request_is_refused(
    name: str, source: str, mark: str
):
    builder = make_builder(source, mark)
    call = calls("Oslo")
    result = replace(message("tool", "res-a", 4, "res-b"), tool_call_id=call.tool_calls[0].id)
    answer = Message(role="assistant", content="Answered.")
    conversations = [
        [message("user", 1)],
        [message("user", "aa-1", 1, "bb-2", 2, 3, "cc-3")],
        [SYSTEM, message("user", f"aa-1{mark}", 2, f"{mark}bb-2")],
        [message("user", 2, "aa-1"), answer, message("user", "bb-2", 3)],
        [message("user", "aa-1"), call, result, answer, message("user", 5, "bb-2")],
        [message("user", "aa-1"), call, result],
        [message("system", "ss-1", 2), message("user", "aa-1", 1)],
    ]
    for number, messages in enumerate(conversations):
        has_call = any(one.tool_calls for one in messages)
        try:
            prompt = build(builder, *messages, tools=has_call)
        except AppError:
            assert number > 3, "images of the user are supported"
            continue
        widths = [get_image(one).width for m in messages for one in m.images]
        assert find_images(prompt) == widths
        if "| sort(" not in source:  # which moves the image of two parts to the front
            assert_in_order(prompt, messages, mark)


def assert_in_order(prompt: RenderedPrompt, messages: Sequence[Message], mark: str) -> None:
    """Asserts that the texts and images of each message follow each other."""
    starts = iter(prompt.images)
    position = 0
    for one in messages:
        for part in split_parts(one.content, one.images) if one.images else ():
            if isinstance(part, str):
                position = prompt.text.index(part.replace(mark, ""), position)
            else:
                start = next(starts).start
                assert start >= position
                position = start
