"""The ids of words that an output must not contain."""

from app.text.tokenizer import Tokenizer, encode_bad_words
from tests import tiny

TOKENIZER = Tokenizer(tiny.tokenizer())


def test_a_word_is_banned_with_and_without_a_space_before_it():
    ids = encode_bad_words(TOKENIZER, ["ab"], tiny.VOCAB)
    assert ids == (tuple(b"ab"), tuple(b" ab"))


def test_a_word_with_a_space_is_banned_without_it_too():
    assert set(encode_bad_words(TOKENIZER, [" ab"], tiny.VOCAB)) == {tuple(b"ab"), tuple(b" ab")}


def test_a_word_that_cannot_be_sampled_is_omitted():
    assert encode_bad_words(TOKENIZER, ["b"], ord("b")) == ()


def test_no_words_are_no_ids():
    assert encode_bad_words(TOKENIZER, [], tiny.VOCAB) == ()
