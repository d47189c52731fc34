"""The opaque form of reasoning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.opaque_reasoning import decode_reasoning, digest_reasoning, encode_reasoning


@given(st.text())
def test_decoding_returns_the_text(text: str):
    assert decode_reasoning(encode_reasoning(text)) == text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "gAAAA",
        "EqQBCgIYAh",
        encode_reasoning("abc")[:-1],
        encode_reasoning("abc") + "!",
        encode_reasoning("") + "é",
        encode_reasoning("") + "/w==",
    ],
)
def test_content_of_another_server_and_damaged_content_have_no_text(content: str):
    assert decode_reasoning(content) is None


def test_a_digest_depends_on_the_text_and_does_not_contain_it():
    assert digest_reasoning("Hm.") == digest_reasoning("Hm.")
    assert digest_reasoning("Hm.") != digest_reasoning("Hmm.")
    assert decode_reasoning(digest_reasoning("Hm.")) is None


@given(st.text())
def test_no_content_raises(content: str):
    decode_reasoning(content)
    decode_reasoning(encode_reasoning("") + content)
