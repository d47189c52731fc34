"""The running server: which of its models a command refers to."""

from pathlib import Path
from typing import Any

import pytest

from app.commands.servers import find_served_name
from app.core.settings import ModelSettings
from tests import tiny


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two models whose folders have the same name."""
    return tiny.write(tmp_path / "a" / "model"), tiny.write(tmp_path / "b" / "model")


def find(cards: dict[str, dict[str, Any]], folder: Path, alias: str | None = None) -> str | None:
    return find_served_name(cards, ModelSettings(name=str(folder), alias=alias))


def test_another_folder_of_the_same_name_is_another_model(folders: tuple[Path, Path]):
    ours, other = folders
    cards = {"model": {"root": str(other)}}
    assert find(cards, ours) is None
    assert find(cards, ours, alias="model") is None
    assert find(cards, other) == "model"


def test_a_folder_is_found_under_any_alias(folders: tuple[Path, Path]):
    ours, other = folders
    cards = {"model": {"root": str(other)}, "mine": {"root": str(ours)}}
    assert find(cards, ours) == "mine"


def test_a_link_leads_to_the_same_folder(folders: tuple[Path, Path], tmp_path: Path):
    ours, _ = folders
    link = tmp_path / "link"
    link.symlink_to(ours)
    assert find({"model": {"root": str(ours)}}, link) == "model"


def test_without_folders_the_names_decide(folders: tuple[Path, Path]):
    ours, _ = folders
    assert find({"model": {}}, ours) == "model"
    assert find({"mine": {}}, ours, alias="mine") == "mine"
    assert find({"other": {}}, ours) is None


def test_a_name_that_is_no_folder_is_found_by_name():
    cards = {"org/name": {}, "short": {"root": "/models/short"}}
    assert find_served_name(cards, ModelSettings(name="org/name")) == "org/name"
    assert find_served_name(cards, ModelSettings(name="short")) == "short"
