"""deploy/compose.yaml, checked without Docker: references exist, commands are valid, and published
ports are local."""

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
from tests.deploy.command import check_start, parse_serve_command
from tests.server_process import ROOT

FOLDER = ROOT / "deploy"

# the keys of services in the compose specification that we use
SERVICE_KEYS = (
    {"image", "build", "environment", "volumes", "ports", "secrets", "network_mode", "profiles"}
    | {"entrypoint", "command", "init", "restart", "stop_grace_period", "logging"}
    | {"mem_limit", "memswap_limit", "pids_limit", "ulimits"}
    | {"read_only", "tmpfs", "cap_drop", "security_opt"}
)


@pytest.fixture
def document() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))


def interpolate(value: str) -> str:
    """${NAME:-default} with no variable set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def read_environment(service: dict[str, Any]) -> dict[str, str]:
    return {name: interpolate(value) for name, value in service.get("environment", {}).items()}


def test_all_keys_are_of_the_compose_specification(document: dict[str, Any]) -> None:
    assert set(document) == {"name", "services", "volumes", "secrets"}
    for service in document["services"].values():
        assert set(service) <= SERVICE_KEYS


def test_mounted_folders_and_secrets_exist(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        for mount in service.get("volumes", ()):
            source, target, *_ = mount.split(":")
            assert target.startswith("/"), name
            if source.startswith("."):
                assert (FOLDER / source).exists(), source
            else:
                assert source in document["volumes"]
        assert set(service.get("secrets", ())) <= set(document["secrets"])


def test_secrets_are_files_that_git_ignores(document: dict[str, Any]) -> None:
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert {"/deploy/secrets/", "/deploy/.env"} <= set(ignored)
    for secret in document["secrets"].values():
        assert secret["file"].startswith("secrets/")


def test_published_ports_are_local(document: dict[str, Any]) -> None:
    ports = [port for service in document["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 3
    for port in ports:
        assert port.startswith("127.0.0.1:")


def test_services_restart_and_have_limits(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        if "profiles" in service:
            continue
        assert service["restart"] == "unless-stopped", name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
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
    assert server["read_only"] is True
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
    assert credentials == "/run/secrets/prometheus"
    assert prometheus["secrets"] == ["prometheus"]
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


def test_the_commands_in_the_head_create_the_secrets(
    document: dict[str, Any], tmp_path: Path
) -> None:
    head = (FOLDER / "compose.yaml").read_text("utf-8").partition("\nname:")[0]
    lines = [line.removeprefix("#").strip() for line in head.splitlines() if "secrets" in line]
    created = {found for line in lines for found in re.findall(r"> (secrets/\w+)", line)}
    assert created == {secret["file"] for secret in document["secrets"].values()}
    assert document["services"]["keys"]["entrypoint"] == ["mlxrunner", "key"]
    assert document["services"]["keys"]["volumes"] == ["keys:/keys"]
    key_file = tmp_path / "keys.toml"
    for line in re.findall(r"run --rm (?:-T )?keys ([^>\n]*)", head):
        words = line.replace("/keys/keys.toml", str(key_file)).split()
        key = subprocess.run(
            [sys.executable, "-m", "app", "key", *words],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        # the complete content of a file with this output
        assert re.fullmatch(r"\S{16,}\n", key)
    created = parse_key_file(key_file.read_text("utf-8"))
    assert [(key.name, key.admin) for key in created] == [("me", False), ("prometheus", True)]


def parse_seconds(duration: str) -> int:
    assert duration.endswith("s")
    return int(duration[:-1])


def test_the_settings_of_the_image_and_of_the_file_agree(document: dict[str, Any]) -> None:
    """An empty variable counts as unset, so that .env may omit them."""
    variables = {**image.variables(), **read_environment(document["services"]["server"])}
    assert variables["MLXRUNNER_MODELS"] == variables["MLXRUNNER_PULL"] == ""
    assert parse_serve_command(image.entry([]), variables).models == Settings().models
