"""Bounds on the growth of text in a tokenizer, compared with the library."""

import base64
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers

from app.core.errors import LibraryPanic, PanicGuard
from app.text.tokenizer_expansion import ExpansionFactors
from tests.text.conftest import KINDS, REAL


def estimate(normalizer=None, pre_tokenizer=None, decoder=None) -> ExpansionFactors:
    parts = (normalizer, pre_tokenizer, decoder)
    configs = [{} if part is None else json.loads(part.__getstate__()) for part in parts]
    return ExpansionFactors.from_config(*configs)


def replace(pattern: str, content: str) -> normalizers.Normalizer:
    return normalizers.Replace(pattern, content)


def expression(pattern: str, content: str) -> normalizers.Normalizer:
    return normalizers.Replace(tokenizers.Regex(pattern), content)


def test_a_multiplying_chain_is_rejected():
    bomb = normalizers.Sequence([replace("a", "a" * 1000)] * 6)
    with pytest.raises(ValueError, match=r"its normalizers can make a text 1e\+18 times as long"):
        estimate(bomb)
    # also if it is nested, and for any letter
    nested = normalizers.Sequence([bomb, normalizers.NFC()])
    with pytest.raises(ValueError, match="the limit is 2000 times"):
        estimate(nested)


def test_a_factor_beyond_the_range_of_float_is_rejected():
    chain = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 10_000}
    with pytest.raises(ValueError, match="times as long"):
        ExpansionFactors.from_config({"type": "Sequence", "normalizers": [chain] * 200}, {}, {})


def test_pre_tokenizers_and_decoders_are_limited_too():
    each_byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(ValueError, match=r"its pre-tokenizers can make a text 1\.15e\+18 times"):
        estimate(pre_tokenizer=pre_tokenizers.Sequence([each_byte] * 30))
    with pytest.raises(ValueError, match=r"its decoders can make a text 1e\+06 times"):
        estimate(decoder=decoders.Sequence([decoders.Replace("a", "a" * 1000)] * 2))


def test_the_factor_of_a_precompiled_table_is_its_longest_text():
    table = (8).to_bytes(4, "little") + bytes(8) + b"a\0" + b"b" * 70 + b"\0c\0"
    config = {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(table).decode(),
    }
    assert ExpansionFactors.from_config(config, {}, {}).normalizer == 70


def test_tokenizers_of_published_models_are_accepted(request):
    for name in KINDS:
        tokenizer = request.getfixturevalue("tokenizers_by_kind")[name]
        estimate(tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    shared = request.getfixturevalue("shared")
    for name in REAL:
        tokenizer = tokenizers.Tokenizer.from_file(str(shared / name / "tokenizer.json"))
        factors = estimate(tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
        assert factors.normalizer <= 12
    albert = normalizers.Sequence(
        [
            replace("``", '"'),
            replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            expression(" {2,}", " "),
        ]
    )
    assert estimate(albert).normalizer * 33 < 2000  # its table's longest text has 33 bytes


# normalizers of each kind, some with random parameters
NORMALIZERS = st.one_of(
    st.sampled_from(
        [
            normalizers.BertNormalizer(),
            normalizers.ByteLevel(),
            normalizers.Lowercase(),
            normalizers.NFC(),
            normalizers.NFD(),
            normalizers.NFKC(),
            normalizers.NFKD(),
            normalizers.Nmt(),
            normalizers.Strip(),
            normalizers.StripAccents(),
        ]
    ),
    st.builds(normalizers.Prepend, st.text(max_size=4)),
    st.builds(replace, st.text("ab é\u0130\ufdfa", max_size=3), st.text(max_size=4)),
    st.builds(
        expression,
        st.sampled_from(["a", "a*", "a?", "[ab]+", "b{2}?", r"a\K", "(?=a)", r"\s", "é|"]),
        st.text(max_size=4),
    ),
)
# some of these have the largest expansions in Unicode
LETTERS = st.text(
    st.sampled_from("ab  é\u0130\u0390\u1d160\ufdfa日\u0344"), min_size=1, max_size=12
)


@given(parts=st.lists(NORMALIZERS, min_size=1, max_size=3), text=LETTERS)
def test_no_text_grows_beyond_the_bound(parts, text):
    chain = normalizers.Sequence(parts)
    try:
        factor = estimate(chain).normalizer
    except ValueError:
        return
    try:
        with PanicGuard():
            normalized = chain.normalize_str(text)
    except LibraryPanic:  # the library panics on some empty matches
        return
    assert len(normalized.encode()) <= factor * len(text.encode())


@given(
    parts=st.lists(
        st.sampled_from(
            [
                pre_tokenizers.ByteLevel(add_prefix_space=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.Metaspace(),
                pre_tokenizers.Metaspace("日", split=True),
                pre_tokenizers.Split("", "isolated"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.BertPreTokenizer(),
            ]
        ),
        min_size=1,
        max_size=3,
    ),
    text=LETTERS,
)
def test_no_pre_tokenized_text_grows_beyond_the_bound(parts, text):
    chain = pre_tokenizers.Sequence(parts)
    try:
        factor = estimate(pre_tokenizer=chain).pre_tokenizer
    except ValueError:
        return
    pieces = chain.pre_tokenize_str(text)
    assert sum(len(piece.encode()) for piece, _ in pieces) <= factor * len(text.encode())
