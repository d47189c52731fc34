"""Modules of the page without a browser, run by Node (modules.mjs)."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.api.page.endpoints import STATIC
from tests.server_process import TIMEOUT

Check = Callable[..., Any]


@pytest.fixture(scope="module")
def check(node: str) -> Check:
    """check(name): runs a check of modules.mjs, and returns its result."""

    def run(name: str) -> Any:
        driver = Path(__file__).parent / "modules.mjs"
        printed = subprocess.run(
            [node, "--no-warnings", str(driver), str(STATIC), name],
            capture_output=True,
            check=True,
            timeout=2 * TIMEOUT,
        ).stdout
        return json.loads(printed)

    return run


def test_a_text_that_grows_has_the_blocks_of_the_complete_text(check: Check):
    """The parser keeps the blocks that cannot change while an answer is streamed."""
    assert check("growing") is None


def test_deep_quotes_and_lists_are_shown_as_text(check: Check):
    """markdown-it omits what is nested too deeply."""
    seen = check("depth")
    assert seen["deepest"] < 40
    assert seen["lost"] == []


def test_copies_of_a_conversation_are_merged_without_a_loss(check: Check):
    """An import replaced what the browser had."""
    assert check("merging") is None


def test_files_of_version_1_are_merged_by_their_content(check: Check):
    """Their messages have no ids."""
    assert check("versions") == {
        "merged": ["Q", "A", "Q", "B"],
        "count": 4,
        "all": ["Q", "A", "Q", "B", "C"],
        "shown": ["Q", "A", "Q", "B"],
        "incomplete": 0,
    }


@pytest.mark.timing
def test_no_text_of_a_model_takes_more_than_linear_time(check: Check):
    """50,000 spaces below a line with a pipe froze the page: a pattern of the table's second line
    tried every way to divide them."""
    times = check("times")
    assert len(times) > 100
    # eight times the text; a quadratic search takes 64 times as long, which is seconds
    slow = [row for row in times if row[2] > 30 * row[1] and row[2] > 1000]
    assert slow == []


def test_images_are_exported_and_come_before_the_text_of_their_message(check: Check):
    """A file cannot make the page load an image from another server."""
    url = "data:image/png;base64,AAAA"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    assert check("images") == {"kept": [url], "sent": [{"role": "user", "content": content}]}
