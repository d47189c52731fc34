"""Prompts for models that fill in, in each published form."""

import pytest

from app.core.errors import AppError
from app.text.infill import build_infill_prompt, find_infill_stop_ids
from app.text.tokenizer import Tokenizer
from tests import tiny
from tests.text import conftest

# tokens, and the prompt with them written out; P and S stand for prefix and suffix
FORMS = {
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"): "<fim_prefix>P<fim_suffix>S<fim_middle>",
    (
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
    ): "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"): "<fim-prefix>P<fim-suffix>S<fim-middle>",
    ("▁<PRE>", "▁<SUF>", "▁<MID>"): "▁<PRE>P▁<SUF>S▁<MID>",
    ("<PRE>", "<SUF>", "<MID>"): "<PRE>P<SUF>S<MID>",
    (
        "<｜fim▁begin｜>",
        "<｜fim▁hole｜>",
        "<｜fim▁end｜>",
    ): "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
    ("[PREFIX]", "[SUFFIX]"): "[SUFFIX]S[PREFIX]P",
}


def knowing(*tokens: str, bos: bool = False) -> Tokenizer:
    inner = tiny.tokenizer()
    inner.add_special_tokens(list(tokens))
    return Tokenizer(inner, bos_token_id=tiny.BOS, add_bos=bos)


@pytest.mark.parametrize("tokens", FORMS)
def test_each_form_is_written_with_its_tokens(tokens: tuple[str, ...]) -> None:
    made = knowing(*tokens)
    ids = build_infill_prompt(made, "P", "S")
    assert made.decode_verbatim(ids) == FORMS[tokens]
    assert {made.added_token_to_id(token) for token in tokens} <= set(ids)


def test_a_text_begins_as_the_models_texts_begin() -> None:
    made = knowing("[PREFIX]", "[SUFFIX]", bos=True)
    assert build_infill_prompt(made, "P", "S")[0] == tiny.BOS
    assert list(build_infill_prompt(made, "P", "S")).count(tiny.BOS) == 1


@pytest.mark.parametrize("tokens", [(), ("<PRE>", "<SUF>"), ("[PREFIX]",)])
def test_a_model_without_the_tokens_refuses(tokens: tuple[str, ...]) -> None:
    with pytest.raises(AppError, match="does not support fill-in-the-middle") as caught:
        build_infill_prompt(knowing(*tokens), "P", "S")
    assert caught.value.param == "suffix"


@pytest.mark.parametrize("suffix", [" and the cat", "the", "\n", "é", "日本"])
def test_no_space_is_put_before_what_follows(suffix: str) -> None:
    """SentencePiece begins every text with a space; a suffix is no beginning."""
    inner = conftest.sentence_piece()
    inner.add_special_tokens(["[PREFIX]", "[SUFFIX]"])
    made = Tokenizer(inner, bos_token_id=1, add_bos=False)
    ids = list(build_infill_prompt(made, "a", suffix))
    tail = ids[
        ids.index(made.added_token_to_id("[SUFFIX]") or -1) + 1 : ids.index(
            made.added_token_to_id("[PREFIX]") or -1
        )
    ]
    assert b"".join(map(made.token_bytes, tail)).decode() == suffix


def test_tokens_that_end_what_is_filled_in_are_known() -> None:
    made = knowing("<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>")
    assert find_infill_stop_ids(made) == {
        made.added_token_to_id("<|fim_pad|>"),
        made.added_token_to_id("<|file_sep|>"),
    }
    assert find_infill_stop_ids(knowing()) == frozenset()
