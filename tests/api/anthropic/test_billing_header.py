"""Claude Code's billing header never reaches the prompt."""

import pytest

from app.api.anthropic.messages import strip_billing_header

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.a3f; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("cch", ["00000", "5e1c9"])
@pytest.mark.parametrize("rest", ["", "You are Claude Code.", "Two\nlines"])
def test_the_header_and_its_line_end_are_removed(cch: str, rest: str) -> None:
    header = HEADER.format(cch)
    assert strip_billing_header(f"{header}\n{rest}") == rest
    assert strip_billing_header(f"{header}\n\n{rest}") == rest
    assert strip_billing_header(header) == ""


@pytest.mark.parametrize(
    "text",
    ["", "\n  a", "The x-anthropic-billing-header: is a line.", "a\nx-anthropic-billing-header: b"],
)
def test_any_other_text_is_unchanged(text: str) -> None:
    assert strip_billing_header(text) == text
