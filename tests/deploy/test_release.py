"""The release workflow and the Homebrew formula, checked without GitHub and Homebrew: their files,
targets and versions exist."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMULA = ROOT / "deploy/homebrew/mlxrunner.rb"


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return yaml.safe_load((ROOT / "deploy/workflows/release.yml").read_text("utf-8"))


def list_steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    return job["steps"]


def test_each_job_has_its_form(workflow: dict[Any, Any]) -> None:
    """YAML reads the key `on` as true."""
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    for name, job in workflow["jobs"].items():
        assert job["runs-on"], name
        assert set(job) <= {"runs-on", "strategy", "steps", "env", "needs", "permissions"}, name
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= set(workflow["jobs"])
        for step in list_steps(job):
            assert len({"uses", "run"} & set(step)) == 1
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))


def test_each_expression_has_a_value(workflow: dict[Any, Any]) -> None:
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        keys = {key for row in matrix.get("include", [matrix]) for key in row}
        for name in re.findall(r"\$\{\{ ([\w.]+) \}\}", yaml.safe_dump(job)):
            context, _, key = name.partition(".")
            known = {"actor", "ref_name", "repository", "token"}
            assert key in (keys if context == "matrix" else known), name


def test_only_the_jobs_that_publish_may_write(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    writable = {
        (name, scope)
        for name, job in workflow["jobs"].items()
        for scope, access in job.get("permissions", {}).items()
        if access == "write"
    }
    assert writable == {("image", "packages"), ("manifest", "packages"), ("release", "contents")}


def test_the_wheels_are_for_each_supported_python(workflow: dict[Any, Any]) -> None:
    job = workflow["jobs"]["wheels"]
    versions = subprocess.run(
        [ROOT / ".ci/interpreters", "--versions"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert job["strategy"]["matrix"]["python"] == versions
    [command] = [step["run"] for step in list_steps(job) if "run" in step]
    [target] = re.findall(r"^make ([a-z-]+)", command)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def test_the_image_has_the_arguments_of_the_dockerfile(workflow: dict[Any, Any]) -> None:
    [build] = [
        step["with"]["build-args"]
        for step in list_steps(workflow["jobs"]["image"])
        if "build-push" in step.get("uses", "")
    ]
    assert f"ARG {build.partition('=')[0]}=" in (ROOT / "Dockerfile").read_text("utf-8")


def test_the_formula_of_a_release(tmp_path: Path, workflow: dict[Any, Any]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    archive = tmp_path / f"mlxrunner-{version}.tar.gz"
    archive.write_bytes(b"archive")
    [command] = [
        step["run"]
        for step in list_steps(workflow["jobs"]["release"])
        if "formula.py" in step.get("run", "")
    ]
    script = re.findall(r"deploy/\S+\.py", command)[0]
    text = subprocess.run(
        [sys.executable, ROOT / script, "some/where", archive],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "OWNER" not in text
    assert f'  url "https://github.com/some/where/releases/download/v{version}/' in text
    assert re.search(r'^  sha256 "(?!0{64})[0-9a-f]{64}"$', text, re.MULTILINE)
    assert text.startswith("class Mlxrunner < Formula\n")


def test_the_formula_has_the_version_and_the_script_of_this_tree() -> None:
    text = FORMULA.read_text("utf-8")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"/v{version}/mlxrunner-{version}.tar.gz" in text
    [script] = re.findall(r'system python, "([^"]+)", libexec$', text, re.MULTILINE)
    assert (ROOT / script).is_file()
    pythons = set(re.findall(r"python@?(3\.\d+)", text))
    assert len(pythons) == 1
    versions = (ROOT / ".ci/interpreters").read_text("utf-8")
    assert pythons.pop() in re.findall(r'^versions="([\d. ]+)"', versions, re.MULTILINE)[0].split()


@pytest.mark.skipif(shutil.which("ruby") is None, reason="no ruby")
def test_the_formula_is_valid_ruby() -> None:
    process = subprocess.run(["ruby", "-c", FORMULA], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (0, "Syntax OK\n"), process.stderr
