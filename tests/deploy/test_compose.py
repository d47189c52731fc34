"""deploy/compose.yaml, read without Docker: each reference leads somewhere, each command would
start, and nobody but this machine can reach what is published."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.core.settings import Settings
from app.http.api_keys import parse_key_file
from tests import test_dockerfile as image
from tests.deploy.command import settings_of, would_start
from tests.server_process import ROOT

FOLDER = ROOT / "deploy"

# of the compose specification's services, what we use
SERVICE_KEYS = (
    {"image", "build", "environment", "volumes", "ports", "secrets", "network_mode", "profiles"}
    | {"entrypoint", "command", "init", "restart", "stop_grace_period", "logging"}
    | {"mem_limit", "memswap_limit", "pids_limit", "ulimits"}
    | {"read_only", "tmpfs", "cap_drop", "security_opt"}
)


@pytest.fixture
def document() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))


def interpolated(value: str) -> str:
    """${NAME:-default}, where nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def environment(service: dict[str, Any]) -> dict[str, str]:
    return {name: interpolated(value) for name, value in service.get("environment", {}).items()}


def test_it_says_nothing_that_compose_does_not_know(document: dict[str, Any]) -> None:
    assert set(document) == {"name", "services", "volumes", "secrets"}
    for service in document["services"].values():
        assert set(service) <= SERVICE_KEYS


def test_what_is_mounted_exists(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        for mount in service.get("volumes", ()):
            source, target, *_ = mount.split(":")
            assert target.startswith("/"), name
            if source.startswith("."):
                assert (FOLDER / source).exists(), source
            else:
                assert source in document["volumes"]
        assert set(service.get("secrets", ())) <= set(document["secrets"])


def test_secrets_are_files_that_git_never_sees(document: dict[str, Any]) -> None:
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert {"/deploy/secrets/", "/deploy/.env"} <= set(ignored)
    for secret in document["secrets"].values():
        assert secret["file"].startswith("secrets/")


def test_only_this_machine_reaches_what_is_published(document: dict[str, Any]) -> None:
    published = [
        port for service in document["services"].values() for port in service.get("ports", ())
    ]
    assert len(published) == 3
    for port in published:
        assert port.startswith("127.0.0.1:")


def test_what_runs_for_long_starts_again_within_limits(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        if "profiles" in service:
            continue
        assert service["restart"] == "unless-stopped", name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert re.fullmatch(r"\d+g", interpolated(service["mem_limit"]))
        assert service["logging"]["options"]["max-size"]


def test_the_server_would_start_and_answers_to_the_name_that_prometheus_uses(
    document: dict[str, Any],
) -> None:
    server = document["services"]["server"]
    around = {**image.variables(), **environment(server)}
    settings = would_start(settings_of(image.entry([]), around), around)
    assert settings.api_keys == "/keys/keys.toml"
    assert "server" in document["services"]
    assert settings.allowed_hosts == ("server",)
    assert server["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    assert seconds(server["stop_grace_period"]) >= settings.drain + 20
    assert server["ulimits"]["nofile"] >= settings.max_connections + 256
    assert server["read_only"] is True
    # all that is written, by the head of the recipe
    assert {mount.split(":")[1] for mount in server["volumes"]} | set(server["tmpfs"]) == {
        *image.arguments("VOLUME", image.stages()[-1]),
        "/keys",
        "/tmp",
    }


def test_prometheus_asks_the_server_with_the_key_that_was_made_for_it(
    document: dict[str, Any],
) -> None:
    prometheus = document["services"]["prometheus"]
    asked = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text("utf-8"))
    [job] = asked["scrape_configs"]
    targets = [target for one in job["static_configs"] for target in one["targets"]]
    assert targets == [f"server:{Settings().port}"]
    credentials = job["authorization"]["credentials_file"]
    assert credentials == "/run/secrets/prometheus"
    assert prometheus["secrets"] == ["prometheus"]
    for rules in asked.get("rule_files", ()):
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


def test_the_commands_in_its_head_make_what_it_needs(
    document: dict[str, Any], tmp_path: Path
) -> None:
    head = (FOLDER / "compose.yaml").read_text("utf-8").partition("\nname:")[0]
    told = [line.removeprefix("#").strip() for line in head.splitlines() if "secrets" in line]
    made = {found for line in told for found in re.findall(r"> (secrets/\w+)", line)}
    assert made == {secret["file"] for secret in document["secrets"].values()}
    assert document["services"]["keys"]["entrypoint"] == ["mlxrunner", "key"]
    assert document["services"]["keys"]["volumes"] == ["keys:/keys"]
    ring = tmp_path / "keys.toml"
    for line in re.findall(r"run --rm (?:-T )?keys ([^>\n]*)", head):
        words = line.replace("/keys/keys.toml", str(ring)).split()
        key = subprocess.run(
            [sys.executable, "-m", "app", "key", *words],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        # all that a file into which it is written would hold
        assert re.fullmatch(r"\S{16,}\n", key)
    made = parse_key_file(ring.read_text("utf-8"))
    assert [(key.name, key.admin) for key in made] == [("me", False), ("prometheus", True)]


def seconds(written: str) -> int:
    assert written.endswith("s")
    return int(written[:-1])


def test_settings_of_the_image_and_of_the_file_agree(document: dict[str, Any]) -> None:
    """An empty variable is none, so that .env may leave them out."""
    around = {**image.variables(), **environment(document["services"]["server"])}
    assert around["MLXRUNNER_MODELS"] == around["MLXRUNNER_PULL"] == ""
    assert settings_of(image.entry([]), around).models == Settings().models
