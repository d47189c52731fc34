"""Fill-in-the-middle prompts, in each published format."""

import pytest

from app.core.errors import AppError
from app.text.infill import build_infill_prompt, find_infill_stop_ids
from app.text.tokenizer import Tokenizer
from tests import tiny
from tests.text import conftest

# tokens, and the prompt as text; P is the prefix, S the suffix
FORMATS = {
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


def make_tokenizer(*tokens: str, bos: bool = False) -> Tokenizer:
    inner = tiny.tokenizer()
    inner.add_special_tokens(list(tokens))
    return Tokenizer(inner, bos_token_id=tiny.BOS, add_bos=bos)


@pytest.mark.parametrize("tokens", FORMATS)
def test_each_format_is_built_with_its_tokens(tokens: tuple[str, ...]) -> None:
    tokenizer = make_tokenizer(*tokens)
    ids = build_infill_prompt(tokenizer, "P", "S")
    assert tokenizer.decode_verbatim(ids) == FORMATS[tokens]
    assert {tokenizer.added_token_to_id(token) for token in tokens} <= set(ids)


def test_the_prompt_begins_with_one_bos_token() -> None:
    tokenizer = make_tokenizer("[PREFIX]", "[SUFFIX]", bos=True)
    assert build_infill_prompt(tokenizer, "P", "S")[0] == tiny.BOS
    assert list(build_infill_prompt(tokenizer, "P", "S")).count(tiny.BOS) == 1


@pytest.mark.parametrize("tokens", [(), ("<PRE>", "<SUF>"), ("[PREFIX]",)])
def test_a_model_without_the_tokens_is_an_error(tokens: tuple[str, ...]) -> None:
    with pytest.raises(AppError, match="does not support fill-in-the-middle") as caught:
        build_infill_prompt(make_tokenizer(*tokens), "P", "S")
    assert caught.value.param == "suffix"


@pytest.mark.parametrize("suffix", [" and the cat", "the", "\n", "é", "日本"])
def test_no_space_is_inserted_before_the_suffix(suffix: str) -> None:
    """SentencePiece begins every text with a space, which is wrong for a suffix."""
    inner = conftest.sentence_piece()
    inner.add_special_tokens(["[PREFIX]", "[SUFFIX]"])
    tokenizer = Tokenizer(inner, bos_token_id=1, add_bos=False)
    ids = list(build_infill_prompt(tokenizer, "a", suffix))
    tail = ids[
        ids.index(tokenizer.added_token_to_id("[SUFFIX]") or -1) + 1 : ids.index(
            tokenizer.added_token_to_id("[PREFIX]") or -1
        )
    ]
    assert b"".join(map(tokenizer.token_bytes, tail)).decode() == suffix


def test_stop_tokens_of_infill_models_are_found() -> None:
    tokenizer = make_tokenizer("<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>")
    assert find_infill_stop_ids(tokenizer) == {
        tokenizer.added_token_to_id("<|fim_pad|>"),
        tokenizer.added_token_to_id("<|file_sep|>"),
    }
    assert find_infill_stop_ids(make_tokenizer()) == frozenset()
