"""The jobs of prompts with images: row IDs, spans, and options that images exclude."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.images import ImageSpan, PlacedImage, make_row_id
from app.core.jobs import ContextLimit
from app.core.model_files import ModelFiles
from app.core.requests import Conversation, GenerateRequest, Message
from app.core.settings import Settings
from app.images.decoder import ImageDecoder
from app.serving.prompt_jobs import JobBuilder, PreparedChoice
from tests import tiny
from tests.image_files import make_image

CONTEXT_LIMIT = ContextLimit(model_context=256, configured_context=None, capacity=None)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def files(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The files of a Qwen3-VL model with a byte tokenizer."""
    path = tmp_path_factory.mktemp("vision") / "tokenizer.json"
    inner = tiny.tokenizer()
    inner.add_special_tokens(["<|vision_start|>", PAD, "<|vision_end|>"])
    inner.save(str(path))
    files = store.resolve(str(tiny_model))
    return replace(
        files,
        tokenizer_path=path,
        chat_template=TEMPLATE,
        config={
            **files.config,
            "model_type": "qwen3_vl",
            "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
            "vocab_size": tiny.VOCAB + 3,
        },
        processor_config={
            "patch_size": 16,
            "merge_size": 2,
            "size": {"shortest_edge": 1024, "longest_edge": 1 << 20},
        },
    )


def place(offset: int, width: int = 64, height: int = 32, color: int = 0) -> PlacedImage:
    return PlacedImage(offset=offset, image=make_image(width, height, color))


def ask(*images: PlacedImage, text: str = "abc") -> Conversation:
    return Conversation(messages=(Message(role="user", content=text, images=images),))


def make_builder(files: ModelFiles, settings: Settings | None = None) -> JobBuilder:
    return JobBuilder(files, settings or Settings(), ImageDecoder())


def prepare(
    files: ModelFiles, prompt: Conversation, settings: Settings | None = None, **changes: Any
) -> PreparedChoice:
    request = GenerateRequest(**{"model": "tiny", "prompt": prompt, **changes})
    [choice] = make_builder(files, settings).prepare(request, CONTEXT_LIMIT)
    return choice


def get_rows(ids: Sequence[int], span: ImageSpan) -> Sequence[int]:
    return ids[span.start : span.end]


def test_the_rows_of_an_image_have_negative_ids_that_depend_on_it(files: ModelFiles):
    choice = prepare(files, ask(place(1), place(2, color=9)))
    job = choice.job
    first, second = job.images
    assert (first.grid, second.grid) == ((1, 2), (1, 2))
    assert first.key != second.key
    for span in job.images:
        rows = [make_row_id(span.key, row) for row in range(2)]
        assert [*get_rows(job.prompt_token_ids, span)] == rows
    assert sum(id_ < 0 for id_ in job.prompt_token_ids) == 4
    assert choice.images.keys() == {first.key, second.key}
    text = make_builder(files).tokenizer.decode_verbatim(choice.prompt_ids)
    assert text == (
        f"user:a<|vision_start|>{PAD * 2}<|vision_end|>b<|vision_start|>{PAD * 2}<|vision_end|>c;"
    )
    assert len(choice.prompt_ids) == len(job.prompt_token_ids)


def test_a_mark_in_a_text_is_an_ordinary_token(files: ModelFiles):
    choice = prepare(files, ask(place(len(PAD)), text=PAD + PAD))
    pad = make_builder(files).tokenizer.token_to_id(PAD)
    ids = choice.job.prompt_token_ids
    assert [id_ if id_ == pad else "row" for id_ in ids if id_ < 0 or id_ == pad] == [
        pad,
        "row",
        "row",
        pad,
    ]


def test_an_image_token_without_an_embedding_can_be_in_an_image_only(
    files: ModelFiles, tmp_path: Path
):
    """A Gemma 3 in GGUF has such a token."""
    inner = tiny.tokenizer()
    inner.add_special_tokens(["<|vision_start|>", "<|vision_end|>", PAD])
    inner.save(str(tmp_path / "tokenizer.json"))
    lacking = replace(
        files,
        tokenizer_path=tmp_path / "tokenizer.json",
        config={**files.config, "vocab_size": tiny.VOCAB + 2},
    )
    job = prepare(lacking, ask(place(1))).job
    assert max(job.prompt_token_ids) < lacking.vocab_size
    assert sum(id_ < 0 for id_ in job.prompt_token_ids) == 2
    for text in (PAD, f"a {PAD}"):
        with pytest.raises(AppError, match="that the tokenizer has but the model does not"):
            prepare(lacking, ask(place(0), text=text))
    with pytest.raises(AppError, match="that the tokenizer has but the model does not"):
        prepare(lacking, ask(text=PAD))


def test_the_count_of_a_prompt_does_not_need_pixels(files: ModelFiles):
    builder = make_builder(files)
    prompt = ask(place(1, 640, 320))
    rendered = builder.render_prompt(GenerateRequest(model="tiny", prompt=prompt))
    ids = builder.tokenizer.encode(rendered.text, add_special_tokens=rendered.add_special_tokens)
    assert len(ids) == len(prepare(files, prompt).job.prompt_token_ids)


def test_equal_images_have_equal_rows_wherever_they_are(files: ModelFiles):
    alone = prepare(files, ask(place(1))).job
    later = prepare(files, ask(place(0, color=9), place(1))).job
    assert get_rows(alone.prompt_token_ids, alone.images[0]) == get_rows(
        later.prompt_token_ids, later.images[1]
    )


def test_the_maximum_number_of_tokens_per_image_is_a_setting(files: ModelFiles):
    span = prepare(files, ask(place(1, 640, 320)), Settings(image_tokens=16)).job.images[0]
    assert span.grid[0] * span.grid[1] <= 16


def test_message_ends_are_outside_of_images(files: ModelFiles):
    prompt = Conversation(
        messages=(
            Message(role="user", content="a", images=(place(1),)),
            Message(role="assistant", content="b"),
            Message(role="user", content="c", images=(place(0, color=4),)),
        )
    )
    job = prepare(files, prompt).job
    assert job.message_ends
    for end in job.message_ends:
        assert not any(span.start < end < span.end for span in job.images)


def test_an_image_of_an_impossible_shape_is_refused_or_omitted(files: ModelFiles):
    wide = replace(place(0, 1000, 2), required=True)
    with pytest.raises(AppError) as caught:
        prepare(files, ask(wide))
    assert caught.value.kind is ErrorKind.INVALID
    job = prepare(files, ask(place(0, 1000, 2))).job
    assert job.images == ()


@pytest.mark.parametrize("settings", [Settings(), Settings(cache="slots", context_shift=True)])
def test_a_prompt_with_images_is_not_truncated(files: ModelFiles, settings: Settings):
    prompts = (
        ask(place(1), text="x" * 300),
        ask(*[place(1)] * 150),
        replace(ask(place(1)), earlier_ids=(5,) * 300),
    )
    for prompt, rows in zip(prompts, (2, 300, 2), strict=True):
        with pytest.raises(AppError) as caught:
            prepare(files, prompt, replace(settings, context=256))
        assert caught.value.kind is ErrorKind.CONTEXT_LENGTH
        assert f"; {rows} tokens of the prompt belong to images, which" in caught.value.message
        assert caught.value.message.endswith("never truncated: send fewer or smaller images")


def test_prompt_logprobs_are_refused_with_images(files: ModelFiles):
    with pytest.raises(AppError, match="prompt_logprobs is not supported") as caught:
        prepare(files, ask(place(0)), prompt_logprobs=1)
    assert caught.value.param == "prompt_logprobs"


def test_images_follow_the_tokens_of_an_earlier_conversation(files: ModelFiles):
    earlier = replace(ask(place(1)), earlier_ids=(5, 6, 7))
    job = prepare(files, earlier).job
    plain = prepare(files, ask(place(1))).job
    assert job.images[0].start - plain.images[0].start == len(job.prompt_token_ids) - len(
        plain.prompt_token_ids
    )
    assert get_rows(job.prompt_token_ids, job.images[0])[0] == make_row_id(job.images[0].key, 0)


def test_an_earlier_conversation_with_an_image_is_refused(files: ModelFiles):
    ids = prepare(files, ask(place(1))).prompt_ids
    with pytest.raises(AppError, match="context contains an image"):
        prepare(files, replace(ask(), earlier_ids=ids))


def test_a_model_without_its_vision_tower_reads_text_only(files: ModelFiles):
    with pytest.raises(AppError, match="this model reads text only"):
        prepare(files, ask(place(0)), Settings(vision=False))
