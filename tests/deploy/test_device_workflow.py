"""The workflow that tests a GPU on a hosted Mac, checked without GitHub: its file is valid, and its
targets, commands and versions exist."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return yaml.safe_load((ROOT / "deploy/workflows/device.yml").read_text("utf-8"))


@pytest.fixture(scope="module")
def job(workflow: dict[Any, Any]) -> dict[str, Any]:
    [job] = workflow["jobs"].values()
    return job


def test_the_workflow_has_its_form(workflow: dict[Any, Any], job: dict[str, Any]) -> None:
    """YAML reads the key `on` as true."""
    assert set(workflow) == {"name", True, "permissions", "jobs"}
    assert set(workflow[True]) == {"push", "pull_request", "workflow_dispatch"}
    assert workflow["permissions"] == {"contents": "read"}
    assert set(job) == {"runs-on", "timeout-minutes", "strategy", "steps"}
    for step in job["steps"]:
        assert len({"uses", "run"} & set(step)) == 1
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))


def test_each_expression_has_a_value(job: dict[str, Any]) -> None:
    names = re.findall(r"\$\{\{ ([\w.]+) \}\}", yaml.safe_dump(job))
    assert sorted(set(names)) == sorted(f"matrix.{key}" for key in job["strategy"]["matrix"])


def test_the_runners_have_a_system_that_mlx_supports(job: dict[str, Any]) -> None:
    runners = job["strategy"]["matrix"]["runner"]
    assert all(int(runner.removeprefix("macos-")) >= 14 for runner in runners)


def test_the_pythons_are_the_oldest_and_the_newest_supported_ones(job: dict[str, Any]) -> None:
    versions = subprocess.run(
        [ROOT / ".ci/interpreters", "--versions"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert job["strategy"]["matrix"]["python"] == [versions[0], versions[-1]]


def test_the_commands_exist(job: dict[str, Any]) -> None:
    make, doctor = (step["run"] for step in job["steps"] if "run" in step)
    [target] = re.findall(r"^make ([a-z-]+) ", make)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(
        rf"^{target}:.*\n\t@\$\(BIN\)/python -m tests\.device ", makefile, re.MULTILINE
    )
    variables = re.findall(r"([A-Z]+)=", make)
    assert all(re.search(rf"^{name} =", makefile, re.MULTILINE) for name in variables)
    assert "--rounds" in (ROOT / "tests/device/__main__.py").read_text("utf-8")
    assert (ROOT / "app/commands" / f"{doctor.split()[-1]}.py").is_file()
