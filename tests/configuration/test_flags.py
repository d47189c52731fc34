"""The command line's flags: what they leave behind, and what is refused."""

import argparse

import pytest

from app.configuration import flags
from app.configuration.options import OPTIONS
from app.configuration.sources import Found
from app.core.settings import ModelSettings


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_settings(parser)
    return flags.parsed(parser, line.split())


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parsed(line)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_what_is_not_given_is_left_to_the_other_sources():
    assert flags.given(parsed("")) == {}


def test_what_is_given_has_its_flag_for_a_place():
    assert flags.given(parsed("--port 9")) == {"port": Found(value=9, place="--port")}


def test_a_switch_can_be_turned_on_and_off():
    assert flags.given(parsed("--pull"))["pull"].value is True
    assert flags.given(parsed("--no-pull"))["pull"].value is False
    assert flags.given(parsed("--pull --no-pull"))["pull"].value is False


def test_what_may_be_several_is_given_again_or_parted_by_commas():
    found = flags.given(parsed("--cors-origin https://a --cors-origin https://b,https://c"))
    assert found["cors_origins"].value == ("https://a", "https://b", "https://c")


@pytest.mark.parametrize("line", ["a b --port 9", "a --port 9 b", "--port 9 a b", "a --pull b"])
def test_models_may_stand_between_flags(line: str):
    assert flags.given(parsed(line))["models"].value == (
        ModelSettings(name="a"),
        ModelSettings(name="b"),
    )


def test_an_unknown_flag_is_refused_with_the_one_that_was_meant(capsys):
    assert refusal("--max-que 3", capsys).endswith("--max-que; did you mean --max-queue?")
    assert refusal("--max-que=3", capsys).endswith("did you mean --max-queue?")
    assert "mean" not in refusal("--zzz", capsys)


def test_a_flag_is_not_cut_short(capsys):
    """`--max-q` could mean another flag in the next version."""
    assert refusal("--max-q 3", capsys).endswith("did you mean --max-queue?")


def test_a_value_that_cannot_be_read_is_told_with_its_flag(capsys):
    told = refusal("--port x", capsys)
    assert told.endswith("argument --port: must be a whole number from 0 to 65535, not 'x'")


def test_help_tells_each_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parsed("--help")
    assert caught.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS:
        assert option.flag in told
        # argparse breaks lines at hyphens too
        assert f"(default: {option.shown(option.default)})".replace("- ", "-") in told.replace(
            "- ", "-"
        )
