"""tests/new_user.py: the parts that need no installation."""

import os
from pathlib import Path

import pytest

from tests.new_user import (
    CHECKS,
    WAYS,
    Row,
    check_log,
    format_table,
    is_compiler,
    link_programs,
    main,
    make_environ,
)


@pytest.mark.parametrize(
    "name",
    ["cc", "c++", "g++", "g++-12", "clang", "clang++-19", "x86_64-linux-gnu-gcc-12", "c99", "gcc"],
)
def test_a_compiler_is_known_by_its_name(name: str):
    assert is_compiler(name)


@pytest.mark.parametrize("name", ["ccache", "make", "git", "gcc-ar", "clang-format", "python3.11"])
def test_another_program_is_no_compiler(name: str):
    assert not is_compiler(name)


def test_the_folder_of_links_has_the_first_program_of_each_name_and_no_compiler(tmp_path: Path):
    for folder, names in (("first", ("make", "g++")), ("second", ("make", "git"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    path = os.pathsep.join(str(tmp_path / name) for name in ("first", "second", "missing"))
    link_programs(path, tmp_path / "links")
    links = {link.name: link.readlink().parent.name for link in (tmp_path / "links").iterdir()}
    assert links == {"make": "first", "git": "second"}


def test_a_new_user_has_no_variables_but_those_of_registries():
    ours = {"PIP_INDEX_URL": "a", "https_proxy": "b", "PYTHONPATH": "c", "CXX": "d", "HOME": "e"}
    kept = {"PIP_INDEX_URL": "a", "https_proxy": "b"}
    assert make_environ(ours, home=None, path="/bin") == {**kept, "PATH": "/bin"}
    assert make_environ(ours, home="", path="/bin") == {**kept, "PATH": "/bin", "HOME": ""}


def test_the_table_shows_times_and_failures():
    ok = Row("3.11.7", "pip", "unset", first=24.44, cpu=12.3, again=1.6)
    failed = Row("3.12.1", "uv", "empty", first=1, cpu=1, again=1, problems={"ps": "no model"})
    ended = Row("3.13.0", "make", "unset", problems={"failed": "no network"})
    lines = format_table([ok, failed, ended]).splitlines()
    assert lines[0].startswith("| Python | way | HOME | to /health | CPU | second start | page | ")
    assert lines[2] == f"| 3.11.7 | pip | unset | 24.4 s | 12.3 s | 1.6 s |{' ok |' * len(CHECKS)}"
    assert lines[3].endswith("| ok | ok | ok | FAILED | ok | ok | ok |")
    assert lines[4] == f"| 3.13.0 | make | unset | – | – | – |{' – |' * len(CHECKS)}"


def test_the_log_must_have_the_address_the_model_and_the_request():
    log = "\n".join(
        [
            "INFO app.http.uvicorn_server: running on http://127.0.0.1:80 (press Ctrl-C to stop)",
            "INFO app.runners.handle: builtin is ready after 1.3 s (context 2048 tokens)",
            "INFO app.access [req_1]: POST /v1/chat/completions 200 ms=5",
        ]
    )
    assert check_log(log, 80) == ""
    assert "running on" in check_log(log, 81)
    assert "no Traceback" in check_log(f"{log}\nTraceback (most recent call last):", 80)


def test_an_unknown_way_is_rejected(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--way", "conda"])
    message = capsys.readouterr().err
    assert all(way.name in message for way in WAYS)
