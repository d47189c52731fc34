"""deploy/compose.yaml, checked without Docker: it matches the published schema, references exist,
commands are valid, and published ports are local. The commands that `setup` and `key` run are also
run here.

compose_spec/schema.json is the schema of the Compose Specification (Apache License 2.0), unchanged,
as in the package check-jsonschema 0.39.0.
"""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from app.core.settings import Settings
from app.http.api_keys import hash_key, parse_key_file
from tests import test_dockerfile as image
from tests.deploy.command import check_start, parse_serve_command
from tests.server_process import ROOT

FOLDER = ROOT / "deploy"


@pytest.fixture
def document() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))


def interpolate(value: str) -> str:
    """${NAME:-default} with no variable set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def read_environment(service: dict[str, Any]) -> dict[str, str]:
    return {name: interpolate(value) for name, value in service.get("environment", {}).items()}


def find_schema_errors(document: dict[str, Any]) -> list[str]:
    schema = json.loads((Path(__file__).parent / "compose_spec/schema.json").read_text("utf-8"))
    return [error.message for error in jsonschema_rs.validator_for(schema).iter_errors(document)]


def test_the_file_matches_the_schema_of_compose(document: dict[str, Any]) -> None:
    assert find_schema_errors(document) == []


def test_a_misspelled_key_does_not_match_the_schema(document: dict[str, Any]) -> None:
    document["services"]["server"]["memlimit"] = "8g"
    assert find_schema_errors(document)


def test_mounted_folders_and_dependencies_exist(document: dict[str, Any]) -> None:
    used: set[str] = set()
    for name, service in document["services"].items():
        for mount in service.get("volumes", ()):
            source, target, *_ = mount.split(":")
            assert target.startswith("/"), name
            if source.startswith("."):
                assert (FOLDER / source).exists(), source
            else:
                used.add(source)
        assert set(service.get("depends_on", ())) <= set(document["services"])
    assert used == set(document["volumes"])


def test_the_image_is_built_and_never_pulled(document: dict[str, Any]) -> None:
    """A registry may have a different image of this name."""
    ours = [one for one in document["services"].values() if one["image"] == "mlxrunner"]
    assert len(ours) == 3
    for service in ours:
        assert service["pull_policy"] == "build"
        assert (FOLDER / service["build"]["context"]).resolve() == ROOT


def test_no_file_in_the_source_tree_contains_a_secret(document: dict[str, Any]) -> None:
    """`docker compose up` needs no file of secrets; git ignores those of earlier versions."""
    assert "secrets" not in document
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert {"/deploy/secrets/", "/deploy/.env"} <= set(ignored)


def test_published_ports_are_local(document: dict[str, Any]) -> None:
    ports = [port for service in document["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 3
    for port in ports:
        assert port.startswith("127.0.0.1:")


def test_services_restart_and_have_limits(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"]
        # Grafana writes to several folders of its image
        assert service.get("read_only", False) is (name != "grafana")
        if name in ("setup", "key"):
            assert service["network_mode"] == "none"
            assert "restart" not in service
            continue
        assert service["restart"] == "unless-stopped"
        assert service["depends_on"] == {"setup": {"condition": "service_completed_successfully"}}
        assert re.fullmatch(r"\d+g", interpolate(service["mem_limit"]))
        assert service["logging"]["options"]["max-size"]


def test_the_server_is_valid_and_allows_the_host_name_of_prometheus(
    document: dict[str, Any],
) -> None:
    server = document["services"]["server"]
    variables = {**image.variables(), **read_environment(server)}
    settings = check_start(parse_serve_command(image.entry([]), variables), variables)
    assert settings.api_keys == "/keys/keys.toml"
    assert "server" in document["services"]
    assert settings.allowed_hosts == ("server",)
    assert server["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    assert parse_seconds(server["stop_grace_period"]) >= settings.drain + 20
    assert server["ulimits"]["nofile"] >= settings.max_connections + 256
    # all writable folders, by the head of the Dockerfile
    assert {mount.split(":")[1] for mount in server["volumes"]} | set(server["tmpfs"]) == {
        *image.arguments("VOLUME", image.stages()[-1]),
        "/keys",
        "/tmp",
    }


def test_prometheus_scrapes_the_server_with_its_key(
    document: dict[str, Any],
) -> None:
    prometheus = document["services"]["prometheus"]
    config = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text("utf-8"))
    [job] = config["scrape_configs"]
    targets = [target for one in job["static_configs"] for target in one["targets"]]
    assert targets == [f"server:{Settings().port}"]
    credentials = job["authorization"]["credentials_file"]
    assert credentials == "/secrets/prometheus/key"
    assert "prometheus-key:/secrets/prometheus:ro" in prometheus["volumes"]
    for rules in config.get("rule_files", ()):
        assert (FOLDER / "prometheus" / Path(rules).name).exists()


def test_grafana_finds_prometheus_and_the_dashboard(document: dict[str, Any]) -> None:
    grafana = document["services"]["grafana"]
    mounts = dict(mount.split(":")[:2][::-1] for mount in grafana["volumes"])
    sources = yaml.safe_load((FOLDER / "provisioning" / "datasource.yaml").read_text("utf-8"))
    [source] = sources["datasources"]
    assert source["url"] == "http://prometheus:9090"
    providers = yaml.safe_load((FOLDER / "provisioning" / "dashboards.yaml").read_text("utf-8"))
    [provider] = providers["providers"]
    assert mounts[provider["options"]["path"]] == "./grafana"
    assert list((FOLDER / "grafana").glob("*.json"))


class Containers:
    """Runs the commands of `setup` and `key` with folders in place of their volumes."""

    def __init__(self, document: dict[str, Any], folder: Path) -> None:
        self._services = document["services"]
        self._folder = folder
        for name in ("keys", "secrets/prometheus", "secrets/grafana"):
            (folder / name).mkdir(parents=True)
        programs = folder / "bin"
        programs.mkdir()
        (programs / "python").symlink_to(sys.executable)
        program = programs / "mlxrunner"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m app "$@"\n')
        program.chmod(0o755)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path}

    def run(self, name: str, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        service = self._services[name]
        # a path in a volume, but not as a part of another path
        folders = re.compile(r"(?<![\w/])(?=/(?:keys|secrets)/)")
        words = [*service["entrypoint"], *(arguments or service.get("command", ()))]
        return subprocess.run(
            [folders.sub(str(self._folder), word) for word in words],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )

    def read(self, path: str) -> str:
        return (self._folder / path).read_text("utf-8")


def test_setup_creates_secrets_once_and_prints_none(
    document: dict[str, Any], tmp_path: Path
) -> None:
    containers = Containers(document, tmp_path)
    paths = ("secrets/prometheus/key", "secrets/grafana/password", "keys/keys.toml")
    containers.run("setup")
    before = [containers.read(path) for path in paths]
    again = containers.run("setup")
    assert [containers.read(path) for path in paths] == before
    key, password, key_file = before
    assert re.fullmatch(r"mr-\S{40,}\n", key)
    assert re.fullmatch(r"\S{24}\n", password)
    [created] = parse_key_file(key_file)
    assert (created.name, created.admin, created.digest) == (
        "prometheus",
        True,
        hash_key(key.strip()),
    )
    assert again.stdout == ""
    # Prometheus and Grafana run as other users; the key file is only for the server's user
    modes = [stat.S_IMODE((tmp_path / path).stat().st_mode) & 0o044 for path in paths]
    assert modes == [0o044, 0o044, 0]


def test_the_output_of_setup_has_no_secret(document: dict[str, Any], tmp_path: Path) -> None:
    """Docker keeps the output of containers on the disk."""
    containers = Containers(document, tmp_path)
    first = containers.run("setup")
    for path in ("secrets/prometheus/key", "secrets/grafana/password"):
        assert containers.read(path).strip() not in first.stdout + first.stderr


def test_each_consumer_reads_only_its_own_secret(document: dict[str, Any]) -> None:
    volumes = {
        name: {mount.split(":")[0] for mount in service["volumes"]}
        for name, service in document["services"].items()
    }
    for volume, services in (
        ("prometheus-key", {"setup", "prometheus"}),
        ("grafana-password", {"setup", "grafana"}),
        ("keys", {"setup", "key", "server"}),
    ):
        assert {name for name, used in volumes.items() if volume in used} == services
    grafana = document["services"]["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/secrets/grafana/password"


def test_the_folders_of_new_volumes_belong_to_the_user_of_the_image(
    document: dict[str, Any],
) -> None:
    """Docker gives a new volume the owner of the folder in the image."""
    [install] = [run for run in image.arguments("RUN", image.stages()[-1]) if "install -" in run]
    owned = re.findall(r"install --directory --owner=10001 --mode=\d+ ([^&]+)", install)
    folders = {folder for found in owned for folder in found.split()}
    for mount in document["services"]["setup"]["volumes"]:
        assert mount.split(":")[1] in folders, mount


def test_a_key_of_the_guide_is_printed_once_and_added(
    document: dict[str, Any], tmp_path: Path
) -> None:
    """The commands in the head of the file and in the guide."""
    containers = Containers(document, tmp_path)
    containers.run("setup")
    pages = [(FOLDER / name).read_text("utf-8") for name in ("compose.yaml", "README.md")]
    commands = [
        words.split()
        for page in pages
        for words in re.findall(r"^[# ]*docker compose run --rm key (.*)$", page, re.MULTILINE)
    ]
    assert len(commands) >= 2
    for words in commands:
        if "NAME" in words:  # a placeholder
            continue
        key = containers.run("key", words).stdout.strip()
        newest = parse_key_file(containers.read("keys/keys.toml"))[-1]
        assert (newest.name, newest.digest) == (words[0], hash_key(key))
        assert newest.admin is ("--admin" in words)


def parse_seconds(duration: str) -> int:
    assert duration.endswith("s")
    return int(duration[:-1])


def test_the_settings_of_the_image_and_of_the_file_agree(document: dict[str, Any]) -> None:
    """An empty variable counts as unset, so that .env may omit them."""
    variables = {**image.variables(), **read_environment(document["services"]["server"])}
    assert variables["MLXRUNNER_MODELS"] == variables["MLXRUNNER_PULL"] == ""
    assert parse_serve_command(image.entry([]), variables).models == Settings().models
