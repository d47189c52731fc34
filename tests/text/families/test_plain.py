"""Templates without calls, such as Gemma 2's: all output is content."""

from dataclasses import replace
from pathlib import Path

from app.text.family import find_family
from app.text.generic_tool_calls import GenericFamily
from tests.text.families.reading import check_row
from tests.text.families.rows import llamacpp, select_rows, template

NAME = "google-gemma-2-2b-it.jinja"


def test_no_family_claims_the_template(shared: Path):
    assert find_family(template(shared, NAME)) is None


def test_outputs_are_text(shared: Path):
    for row in select_rows(llamacpp(shared, NAME), {}):
        # the generic family claims no template
        check_row(GenericFamily(), replace(row, template=None))
