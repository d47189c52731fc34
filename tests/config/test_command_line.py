"""Command-line flags: the parsed values, and the errors."""

import argparse

import pytest

from app.config import command_line
from app.config.command_line import CommandLineParser, parse_arguments
from app.config.options import OPTIONS, SourcedValue
from app.core.settings import ModelSettings


def flags_parser() -> CommandLineParser:
    parser = CommandLineParser(allow_abbrev=False)
    command_line.add_setting_flags(parser)
    return parser


def parse(line: str) -> argparse.Namespace:
    return parse_arguments(flags_parser(), line.split())


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(line)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("mlxrunner: ")
    return line.removeprefix("mlxrunner: ")


def test_a_flag_that_is_not_given_leaves_the_setting_to_other_sources():
    assert command_line.collect_flags(parse("")) == {}


def test_the_source_of_a_setting_is_its_flag():
    assert command_line.collect_flags(parse("--port 9")) == {
        "port": SourcedValue(value=9, source="--port")
    }


def test_a_switch_can_be_turned_on_and_off():
    assert command_line.collect_flags(parse("--pull"))["pull"].value is True
    assert command_line.collect_flags(parse("--no-pull"))["pull"].value is False
    assert command_line.collect_flags(parse("--pull --no-pull"))["pull"].value is False


def test_a_list_flag_can_be_repeated_or_comma_separated():
    values = command_line.collect_flags(
        parse("--cors-origin https://a --cors-origin https://b,https://c")
    )
    assert values["cors_origins"].value == ("https://a", "https://b", "https://c")


@pytest.mark.parametrize("line", ["a b --port 9", "a --port 9 b", "--port 9 a b", "a --pull b"])
def test_model_names_may_come_between_flags(line: str):
    assert command_line.collect_flags(parse(line))["models"].value == (
        ModelSettings(name="a"),
        ModelSettings(name="b"),
    )


def test_an_unknown_flag_is_rejected_with_a_suggestion(capsys):
    expected = "unknown option --max-que; did you mean --max-queue? ("
    assert refusal("--max-que 3", capsys).startswith(expected)
    assert refusal("--max-que=3", capsys).startswith(expected)
    assert "mean" not in refusal("--zzz", capsys)


def test_flags_cannot_be_abbreviated(capsys):
    """`--max-q` could mean another flag in the next version."""
    assert "did you mean --max-queue?" in refusal("--max-q 3", capsys)


def test_an_invalid_value_is_reported_with_its_flag(capsys):
    message = refusal("--port x", capsys)
    assert message == "--port: must be an integer from 0 to 65535, not 'x'"


def test_an_invalid_choice_is_rejected_with_a_suggestion(capsys):
    assert refusal("--log-level inof", capsys) == (
        "--log-level: must be debug or info or warning or error, not 'inof'; did you mean info?"
    )
    assert refusal("--cache zzz", capsys).endswith("not 'zzz'")


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.is_boolean])
def test_every_option_reports_an_invalid_value_in_one_line(option, capsys):
    """argparse prints twenty-four lines of usage with each."""
    bad = "" if option.value_type.metavar == "FILE" else " \n/ "
    with pytest.raises(SystemExit) as caught:
        parse_arguments(flags_parser(), [option.flag, bad])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mlxrunner: {option.flag}: must be ")


def test_control_characters_in_a_flag_are_escaped(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(flags_parser(), ["--a\nb\x1b[2J"])
    [line] = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_help_lists_the_common_flags_and_help_all_each_one_with_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert {option.flag for option in OPTIONS if option.is_common} == words & {
        option.flag for option in OPTIONS
    }
    with pytest.raises(SystemExit) as caught:
        parse("--help-all")
    assert caught.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS:
        assert option.flag in output
        # argparse breaks lines at hyphens too
        assert f"(default: {option.format_value(option.default)})".replace(
            "- ", "-"
        ) in output.replace("- ", "-")
