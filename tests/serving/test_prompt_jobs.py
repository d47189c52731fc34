"""Requests → jobs: prompts in every form, what fits, and what is named where it does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.model_state import ContextLimit
from app.core.requests import Conversation, GenerateRequest, Message, PromptBatch
from app.core.settings import Settings
from app.serving.prompt_jobs import JobBuilder, PreparedChoice
from tests import tiny

ROOM = ContextLimit(model_context=256, configured_context=None, capacity=None)
PLAIN = Settings()
SHIFTING = Settings(cache="slots", context_shift=True, context=256)


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> ModelFiles:
    return store.resolve(str(tiny_model))


@pytest.fixture(scope="module")
def filling(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model that fills in."""
    path = tmp_path_factory.mktemp("filling") / "tokenizer.json"
    inner = tiny.tokenizer()
    inner.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"])
    inner.save(str(path))
    return replace(
        files, tokenizer_path=path, config={**files.config, "vocab_size": tiny.VOCAB + 4}
    )


def prepared(
    files: ModelFiles,
    settings: Settings = PLAIN,
    **changes: Any,
) -> list[PreparedChoice]:
    request = GenerateRequest(**{"model": "tiny", "prompt": "hello", **changes})
    return JobBuilder(files, settings).prepare(request, ROOM)


def refusal(files: ModelFiles, **changes: Any) -> AppError:
    with pytest.raises(AppError) as caught:
        prepared(files, **changes)
    return caught.value


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ("", ErrorKind.INVALID),
        ((), ErrorKind.INVALID),
        ((1, 10**6), ErrorKind.INVALID),
        ((-1,), ErrorKind.INVALID),
        ("x" * 300, ErrorKind.CONTEXT_LENGTH),
        ((1,) * 300, ErrorKind.CONTEXT_LENGTH),
    ],
)
def test_the_one_of_several_prompts_that_is_wrong_is_named(
    files: ModelFiles, bad: Any, kind: ErrorKind
) -> None:
    error = refusal(files, prompt=PromptBatch(prompts=("fine", bad, "fine")))
    assert (error.kind, error.param) == (kind, "prompt.1")
    assert refusal(files, prompt=bad).param == "prompt"


def test_a_conversation_is_named_by_where_it_stood(files: ModelFiles) -> None:
    said = (Message(role="user", content="x" * 300),)
    assert refusal(files, prompt=Conversation(messages=said)).param == "messages"
    assert refusal(files, prompt=Conversation(messages=said, param="input")).param == "input"


def test_half_a_character_is_refused_with_its_place(files: ModelFiles) -> None:
    error = refusal(files, prompt=PromptBatch(prompts=("fine", "\ud800")))
    assert error.param == "prompt.1"
    assert "surrogate" in error.message


class TestFillingIn:
    def test_the_prompt_and_its_suffix_become_one_prompt(self, filling: ModelFiles) -> None:
        (one,) = prepared(filling, prompt="ab", suffix="cd")
        fim = tiny.VOCAB
        assert one.job.prompt_token_ids == (fim, *b"ab", fim + 1, *b"cd", fim + 2)
        assert fim + 3 in one.job.stop_token_ids

    def test_an_empty_suffix_is_none(self, filling: ModelFiles) -> None:
        (one,) = prepared(filling, prompt="ab", suffix="")
        assert one.job.prompt_token_ids == tuple(b"ab")
        assert one.job.stop_token_ids == {tiny.END}

    def test_an_echo_is_the_prompt_alone(self, filling: ModelFiles) -> None:
        assert prepared(filling, prompt="ab", suffix="cd", echo=True)[0].echo == "ab"

    def test_the_suffix_takes_room_too(self, filling: ModelFiles) -> None:
        assert (
            len(prepared(filling, prompt="a" * 100, suffix="b" * 152)[0].job.prompt_token_ids)
            == 255
        )
        error = refusal(filling, prompt="a" * 100, suffix="b" * 153)
        assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "prompt")
        assert "the prompt with its suffix has 256 tokens" in error.message

    @pytest.mark.parametrize(("prompt", "suffix"), [("a", "b" * 10**7), ("a" * 10**7, "b")])
    def test_far_too_much_is_not_read_to_its_end(
        self, filling: ModelFiles, prompt: str, suffix: str
    ) -> None:
        error = refusal(filling, prompt=prompt, suffix=suffix)
        assert error.kind is ErrorKind.CONTEXT_LENGTH
        assert "has more than 2052 tokens" in error.message

    def test_a_model_that_does_not_says_so(self, files: ModelFiles) -> None:
        assert refusal(files, suffix="cd").param == "suffix"


def test_an_echo_of_ids_is_their_text(files: ModelFiles) -> None:
    assert prepared(files, prompt=tuple(b"hi"), echo=True)[0].echo == "hi"
    assert prepared(files, prompt=tuple(b"hi"))[0].echo is None


def test_the_shift_of_a_context_cuts_the_prompt_and_not_its_echo(files: ModelFiles) -> None:
    (one,) = prepared(files, SHIFTING, prompt="x" * 400 + "end", echo=True)
    assert one.echo == "x" * 400 + "end"
    assert len(one.job.prompt_token_ids) < 256
    assert bytes(one.job.prompt_token_ids).endswith(b"end")


def test_nothing_wanted_is_one_token_that_nobody_sees(files: ModelFiles) -> None:
    (one,) = prepared(files, max_tokens=0, echo=True)
    assert (one.discard_output, one.job.max_tokens) == (True, 1)


def test_only_the_first_choice_tells_the_ids(files: ModelFiles) -> None:
    asked = PromptBatch(prompts=("a", "b"))
    made = prepared(files, prompt=asked, n=2, return_token_ids=True)
    assert [one.return_token_ids for one in made] == [True, False, True, False]
    assert [(one.choice, one.prompt_index) for one in made] == [(0, 0), (1, 0), (2, 1), (3, 1)]


@pytest.mark.parametrize(("asked", "job"), [(None, 50), (50, 50), (51, 50), (7, 7), (10**6, 50)])
def test_no_answer_is_longer_than_the_server_allows(
    files: ModelFiles, asked: int | None, job: int
) -> None:
    for settings in (Settings(max_tokens=50), replace(SHIFTING, max_tokens=50)):
        (one,) = prepared(files, settings, max_tokens=asked)
        assert one.job.max_tokens == job


def test_a_job_knows_whose_it_is(files: ModelFiles) -> None:
    assert [one.job.caller for one in prepared(files, n=2, caller="ann")] == ["ann", "ann"]
