"""Requests → jobs: prompts in every form, context limits, and errors that name the field."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.jobs import Capacity, ContextLimit
from app.core.model_files import ModelFiles
from app.core.requests import Conversation, GenerateRequest, Message, PromptBatch, Regex
from app.core.settings import Settings
from app.serving.prompt_jobs import JobBuilder, PreparedChoice
from tests import tiny

CONTEXT_LIMIT = ContextLimit(model_context=256, configured_context=None, capacity=None)
PLAIN = Settings()
SHIFTING = Settings(cache="slots", context_shift=True, context=256)


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> ModelFiles:
    return store.resolve(str(tiny_model))


@pytest.fixture(scope="module")
def fim_files(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model with fill-in-the-middle tokens."""
    path = tmp_path_factory.mktemp("fim") / "tokenizer.json"
    inner = tiny.tokenizer()
    inner.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"])
    inner.save(str(path))
    return replace(
        files, tokenizer_path=path, config={**files.config, "vocab_size": tiny.VOCAB + 4}
    )


def prepare(
    files: ModelFiles,
    settings: Settings = PLAIN,
    **changes: Any,
) -> list[PreparedChoice]:
    request = GenerateRequest(**{"model": "tiny", "prompt": "hello", **changes})
    return JobBuilder(files, settings).prepare(request, CONTEXT_LIMIT)


def get_error(files: ModelFiles, **changes: Any) -> AppError:
    with pytest.raises(AppError) as caught:
        prepare(files, **changes)
    return caught.value


@pytest.mark.parametrize(
    ("invalid", "kind"),
    [
        ("", ErrorKind.INVALID),
        ((), ErrorKind.INVALID),
        ((1, 10**6), ErrorKind.INVALID),
        ((-1,), ErrorKind.INVALID),
        ("x" * 300, ErrorKind.CONTEXT_LENGTH),
        ((1,) * 300, ErrorKind.CONTEXT_LENGTH),
    ],
)
def test_the_invalid_one_of_several_prompts_is_named(
    files: ModelFiles, invalid: Any, kind: ErrorKind
) -> None:
    error = get_error(files, prompt=PromptBatch(prompts=("fine", invalid, "fine")))
    assert (error.kind, error.param) == (kind, "prompt.1")
    assert get_error(files, prompt=invalid).param == "prompt"


def test_errors_of_a_conversation_name_its_field(files: ModelFiles) -> None:
    messages = (Message(role="user", content="x" * 300),)
    assert get_error(files, prompt=Conversation(messages=messages)).param == "messages"
    assert get_error(files, prompt=Conversation(messages=messages, param="input")).param == "input"


def test_a_surrogate_is_rejected_with_its_index(files: ModelFiles) -> None:
    error = get_error(files, prompt=PromptBatch(prompts=("fine", "\ud800")))
    assert error.param == "prompt.1"
    assert "surrogate" in error.message


class TestFillInTheMiddle:
    def test_the_prompt_and_its_suffix_become_one_prompt(self, fim_files: ModelFiles) -> None:
        (choice,) = prepare(fim_files, prompt="ab", suffix="cd")
        fim = tiny.VOCAB
        assert choice.job.prompt_token_ids == (fim, *b"ab", fim + 1, *b"cd", fim + 2)
        assert fim + 3 in choice.job.stop_token_ids

    def test_an_empty_suffix_is_ignored(self, fim_files: ModelFiles) -> None:
        (choice,) = prepare(fim_files, prompt="ab", suffix="")
        assert choice.job.prompt_token_ids == tuple(b"ab")
        assert choice.job.stop_token_ids == {tiny.END}

    def test_the_echo_excludes_the_suffix(self, fim_files: ModelFiles) -> None:
        assert prepare(fim_files, prompt="ab", suffix="cd", echo=True)[0].echo == "ab"

    def test_the_suffix_counts_for_the_context(self, fim_files: ModelFiles) -> None:
        assert (
            len(prepare(fim_files, prompt="a" * 100, suffix="b" * 152)[0].job.prompt_token_ids)
            == 255
        )
        error = get_error(fim_files, prompt="a" * 100, suffix="b" * 153)
        assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "prompt")
        assert "the prompt with its suffix exceeds the available context size" in error.message

    @pytest.mark.parametrize(("prompt", "suffix"), [("a", "b" * 10**7), ("a" * 10**7, "b")])
    def test_a_huge_prompt_is_tokenized_only_up_to_a_bound(
        self, fim_files: ModelFiles, prompt: str, suffix: str
    ) -> None:
        error = get_error(fim_files, prompt=prompt, suffix=suffix)
        assert error.kind is ErrorKind.CONTEXT_LENGTH
        assert "has more than 2052 tokens" in error.message

    def test_a_model_without_fim_tokens_rejects_a_suffix(self, files: ModelFiles) -> None:
        assert get_error(files, suffix="cd").param == "suffix"


def test_the_echo_of_token_ids_is_their_text(files: ModelFiles) -> None:
    assert prepare(files, prompt=tuple(b"hi"), echo=True)[0].echo == "hi"
    assert prepare(files, prompt=tuple(b"hi"))[0].echo is None


def test_context_shift_truncates_the_prompt_but_not_its_echo(files: ModelFiles) -> None:
    (choice,) = prepare(files, SHIFTING, prompt="x" * 400 + "end", echo=True)
    assert choice.echo == "x" * 400 + "end"
    assert len(choice.job.prompt_token_ids) < 256
    assert bytes(choice.job.prompt_token_ids).endswith(b"end")


def test_max_tokens_zero_generates_one_discarded_token(files: ModelFiles) -> None:
    (choice,) = prepare(files, max_tokens=0, echo=True)
    assert (choice.discard_output, choice.job.max_tokens) == (True, 1)


def test_only_the_first_choice_returns_prompt_token_ids(files: ModelFiles) -> None:
    prompts = PromptBatch(prompts=("a", "b"))
    choices = prepare(files, prompt=prompts, n=2, return_token_ids=True)
    assert [choice.return_token_ids for choice in choices] == [True, False, True, False]
    assert [(choice.choice, choice.prompt_index) for choice in choices] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    ]


@pytest.mark.parametrize(
    ("requested", "job"), [(None, 50), (50, 50), (51, 50), (7, 7), (10**6, 50)]
)
def test_max_tokens_is_limited_by_the_server(
    files: ModelFiles, requested: int | None, job: int
) -> None:
    for settings in (Settings(max_tokens=50), replace(SHIFTING, max_tokens=50)):
        (choice,) = prepare(files, settings, max_tokens=requested)
        assert choice.job.max_tokens == job


def test_a_job_has_the_caller_of_its_request(files: ModelFiles) -> None:
    assert [choice.job.caller for choice in prepare(files, n=2, caller="ann")] == ["ann", "ann"]


MARKED = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def test_a_conversations_job_has_the_ends_of_its_messages(files: ModelFiles) -> None:
    """Where the rendered text says, not where an end-of-sequence id is."""
    marked = replace(files, chat_template=MARKED)
    messages = tuple(
        Message(role=role, content=text)
        for role, text in (("system", "A</s>B"), ("user", "hi"), ("assistant", "ho"), ("user", "x"))
    )
    (choice,) = prepare(marked, prompt=Conversation(messages=messages))
    texts = [
        JobBuilder(marked, PLAIN).tokenizer.decode_verbatim(choice.job.prompt_token_ids[:end])
        for end in choice.job.message_ends or ()
    ]
    system = "<s>system: A</s>B</s>"
    history = system + "<s>user: hi</s><s>assistant: ho</s>"
    assert texts[-1] == history + "<s>user: x</s>"
    assert any(len(history) - 8 < len(text) <= len(history) for text in texts)
    assert texts[0].startswith(system)
    assert "<s>system: A</s>" not in texts
    assert prepare(files, prompt="a</s>b")[0].job.message_ends is None


def test_a_model_that_needs_no_checkpoints_costs_no_further_renders(files: ModelFiles) -> None:
    capacity = Capacity(
        parallel=1,
        context_length=256,
        kv_budget=1,
        kv_bytes_per_sequence=1,
        needs_checkpoints=False,
    )
    talk = Conversation(messages=(Message(role="user", content="hi"),))
    request = GenerateRequest(model="tiny", prompt=talk)
    (choice,) = JobBuilder(files, PLAIN).prepare(request, replace(CONTEXT_LIMIT, capacity=capacity))
    assert choice.job.message_ends == ()


def test_a_prompt_that_is_too_long_has_its_numbers(files: ModelFiles) -> None:
    excess = get_error(files, prompt="x" * 256).excess
    assert excess is not None
    assert (excess.prompt_tokens, excess.context_length) == (256, 256)
    assert excess.output_tokens is None


@pytest.mark.parametrize(("length", "left"), [(200, 56), (248, 8)])
def test_the_output_limit_is_lowered_if_the_prompt_leaves_the_reserve(
    files: ModelFiles, length: int, left: int
) -> None:
    (one,) = prepare(files, prompt="x" * length, max_tokens=1000, output_reserve=8)
    assert one.job.max_tokens == left


def test_a_prompt_that_leaves_less_than_the_reserve_is_rejected(files: ModelFiles) -> None:
    error = get_error(files, prompt="x" * 249, max_tokens=1000, output_reserve=8)
    assert error.kind is ErrorKind.CONTEXT_LENGTH
    excess = error.excess
    assert excess is not None
    assert (excess.prompt_tokens, excess.output_tokens, excess.context_length) == (249, 1000, 256)
    assert prepare(files, SHIFTING, prompt="x" * 249, output_reserve=8)


def test_stop_tokens_of_the_request_end_the_output_beside_the_models(files: ModelFiles) -> None:
    (one,) = prepare(files, stop_token_ids=(5,))
    assert one.job.stop_token_ids == {5, tiny.END}
    assert one.stop_token_ids == {5}
    (endless,) = prepare(files, stop_token_ids=(5,), ignore_eos=True)
    assert endless.job.stop_token_ids == {5}


def test_bad_words_become_ids(files: ModelFiles) -> None:
    (one,) = prepare(files, bad_words=("ab",))
    assert one.job.sampling.bad_words == (tuple(b"ab"), tuple(b" ab"))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stop_token_ids": (tiny.VOCAB,)}, "stop_token_ids"),
        ({"sampling": {"allowed_token_ids": (1, 10**6)}}, "allowed_token_ids"),
        # each could leave nothing to sample
        (
            {"sampling": {"allowed_token_ids": (ord("b"),)}, "bad_words": ("ab",)},
            "allowed_token_ids",
        ),
        (
            {"sampling": {"allowed_token_ids": (5,)}, "stop_token_ids": (5,), "min_tokens": 1},
            "allowed_token_ids",
        ),
        (
            {"stop_token_ids": (5,), "grammar": Regex(pattern="a")},
            "stop_token_ids",
        ),
        (
            {"sampling": {"allowed_token_ids": (5,)}, "grammar": Regex(pattern="a")},
            "allowed_token_ids",
        ),
        ({"bad_words": ("a",), "grammar": Regex(pattern="a")}, "bad_words"),
    ],
)
def test_tokens_that_cannot_be_stopped_at_or_drawn_are_rejected(
    files: ModelFiles, changes: dict[str, Any], param: str
) -> None:
    error = get_error(files, **changes)
    assert (error.kind, error.param) == (ErrorKind.INVALID, param)
