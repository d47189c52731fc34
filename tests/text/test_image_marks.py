"""The name that hides an image mark in a user's text is in no text of the request."""

import re

from hypothesis import given
from hypothesis import strategies as st

from app.core.requests import Message
from app.text.image_marks import ImageMarks
from tests.images.models import load

PROCESSOR = load("qwen3_vl")
NAME_CHARACTERS = "\uf8f1\uf8f2\uf8f3"


def escape(text: str) -> str:
    """The text of a message as the template gets it."""
    marks = ImageMarks(PROCESSOR, [Message(role="user", content=text)], [], {})
    [message] = marks.messages
    assert message.content is not None
    return message.content


@given(text=st.text(alphabet=f"{NAME_CHARACTERS}ab", max_size=30))
def test_a_mark_is_replaced_by_a_name_that_occurs_nowhere_else(text: str) -> None:
    mark = PROCESSOR.mark
    escaped = escape(f"{text}{mark}{text}")
    name = escaped.removeprefix(text).removesuffix(text)
    assert re.fullmatch("\uf8f1\uf8f2+\uf8f3", name)
    assert name not in text
    assert escaped.count(name) == 1


def test_a_text_with_all_short_names_is_read_once() -> None:
    """Each name was searched for in the whole text, so that 30 MB took minutes."""
    names = [f"\uf8f1{length * chr(0xF8F2)}\uf8f3" for length in range(3000)]
    text = "".join(names)
    name = escape(f"{PROCESSOR.mark}{text}").removesuffix(text)
    assert name == f"\uf8f1{3000 * chr(0xF8F2)}\uf8f3"
