"""Templates that know of no calls, such as Gemma 2's: what the model says is what it says."""

from dataclasses import replace
from pathlib import Path

from app.text.family import find_family
from app.text.generic_tool_calls import GenericFamily
from tests.text.families.reading import check_row
from tests.text.families.rows import law, llamacpp, template

NAME = "google-gemma-2-2b-it.jinja"


def test_nobody_claims_such_a_template(shared: Path):
    assert find_family(template(shared, NAME)) is None


def test_its_rows_are_text(shared: Path):
    for row in law(llamacpp(shared, NAME), {}):
        # it claims nothing: it is what is left
        check_row(GenericFamily(), replace(row, template=None))
