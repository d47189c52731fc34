"""Ids of tool calls in Anthropic's form."""

import re

from hypothesis import given
from hypothesis import strategies as st

from app.api.anthropic.tools import to_call_id, to_tool_use_id

# the usual form, Mistral's, Kimi's
IDS = ["call_" + "0a" * 12, "aB3dE6gH9", "functions.get_weather:0", ""]


def test_every_id_has_anthropics_form_and_can_be_recovered():
    for id in IDS:
        made = to_tool_use_id(id)
        assert re.fullmatch("toolu_[a-z0-9]{24,}", made)
        assert to_call_id(made) == id
    assert len({to_tool_use_id(id) for id in IDS}) == len(IDS)


@given(st.text(st.characters(codec="utf-8")))
def test_any_id_can_be_recovered(id: str):
    assert to_call_id(to_tool_use_id(id)) == id


def test_ids_of_others_are_unchanged():
    for id in ("toolu_01A09q90qw90lq917835lq9", "toolu_x", "toolu_xyz1", "toolu_", "call_1"):
        assert to_call_id(id) == id
