"""deploy/README.md, followed word for word: its commands run in a sandbox (guide_sandbox.py), and
the command of the service that they install runs and requires keys.

Not run: the installation of packages, systemd, launchd and Docker.
"""

import contextlib
import os
import plistlib
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from app.http.api_keys import parse_key_file
from tests import tiny
from tests.deploy.guide_sandbox import (
    GUIDE,
    PROGRAM,
    Sandbox,
    find_expected,
    read_blocks,
    read_unit,
)
from tests.deploy.nginx import NAME, Certificate, run_nginx
from tests.deploy.test_install import load_script
from tests.server_process import ROOT, TIMEOUT
from tests.store.stand_in import StandIn
from tests.waiting import wait_until

KEY_FILE = "/etc/mlxrunner/keys.toml"


@dataclass(frozen=True, slots=True)
class Service:
    """A running service of the guide. keys: by name."""

    sandbox: Sandbox
    port: int
    keys: Mapping[str, str]

    def get_status(self, path: str, key: str | None = None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.get(url, headers=headers, timeout=TIMEOUT).status_code


@contextlib.contextmanager
def run_command(
    command: Sequence[str], environment: Mapping[str, str], sandbox: Sandbox
) -> Iterator[int]:
    """Runs the command of a service on a free port; yields the port when the server is ready."""
    log = sandbox.root / "log"
    # a file, because a pipe without a reader would block the server
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**sandbox.environment, "MLXRUNNER_PORT": "0", **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield wait_for_port(process, log)
    finally:
        process.terminate()
        process.wait(TIMEOUT)


def wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + TIMEOUT
    while True:
        text = log.read_text("utf-8")
        assert process.poll() is None, text
        assert time.monotonic() < deadline, text
        if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", text):
            port = int(found[1])
            url = f"http://127.0.0.1:{port}/health"
            if httpx.get(url, timeout=TIMEOUT).status_code == 200:
                return port
        time.sleep(0.05)


def follow_install(sandbox: Sandbox) -> dict[str, str]:
    """Runs the blocks of the first section. Returns the printed keys by their names."""
    install, keys = read_blocks("Install")
    sandbox.run(install)
    printed = sandbox.run(keys).split()
    created = parse_key_file(sandbox.get_path(KEY_FILE).read_text("utf-8"))
    assert [key.admin for key in created] == [True, False]
    return dict(zip((key.name for key in created), printed, strict=True))


@pytest.fixture(scope="module")
def linux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of the section for systemd, with the settings of the section for TLS."""
    if sys.platform != "linux":
        pytest.skip("the section for systemd needs GNU sed and install")
    sandbox = Sandbox.make(tmp_path_factory.mktemp("guide"))
    keys = follow_install(sandbox)
    for block in (*read_blocks("Linux with systemd"), *read_blocks("TLS with nginx")):
        sandbox.run(block)
    unit = sandbox.get_path("/etc/systemd/system/mlxrunner.service")
    create_service_folders(sandbox)
    unit.write_text(sandbox.relocate(unit.read_text("utf-8")), "utf-8")
    with run_command(*read_unit(unit), sandbox) as port:
        yield Service(sandbox, port, keys)


def create_service_folders(sandbox: Sandbox) -> None:
    """Creates the folders that systemd creates for the unit."""
    for folder in ("/var/lib/mlxrunner", "/var/cache/mlxrunner"):
        sandbox.get_path(folder).mkdir(parents=True, mode=0o700)


# Linux


def test_without_a_key_only_the_public_paths_answer(linux: Service) -> None:
    for path in ("/v1/models", "/metrics", "/api/tags", "/v1/engine/events", "/unknown"):
        assert linux.get_status(path) == 401, path
    for path in ("/health", "/v1/status", "/"):
        assert linux.get_status(path) == 200, path
    assert linux.get_status("/v1/models", "mr-guessed") == 401


def test_only_the_admin_key_reads_metrics(linux: Service) -> None:
    for name, status in (("admin", 200), ("anna", 403)):
        assert linux.get_status("/v1/models", linux.keys[name]) == 200
        assert linux.get_status("/metrics", linux.keys[name]) == status


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("name", ["admin", "anna"])
def test_the_check_of_the_guide_prints_the_documented_statuses(linux: Service, name: str) -> None:
    [block] = read_blocks("Check")
    local = block.replace("127.0.0.1:8080", f"127.0.0.1:{linux.port}")
    assert local.count(str(linux.port)) == len(find_expected(block)) == 5
    statuses = linux.sandbox.run(local, answer=f"{linux.keys[name]}\n").split()
    for status, allowed in zip(statuses, find_expected(block), strict=True):
        assert status in allowed
    assert statuses[-1] == ("200" if name == "admin" else "403")


def test_the_files_have_the_documented_permissions(linux: Service) -> None:
    key_file = linux.sandbox.get_path(KEY_FILE)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    text = key_file.read_text("utf-8")
    assert [key for key in linux.keys.values() if key in text] == []
    # the owner is replaced by a stub, which recorded it
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    owners = [f"-R {user} /opt/mlxrunner", "-R root /opt/mlxrunner", f"mlxrunner {KEY_FILE}"]
    assert linux.sandbox.get_calls("chown") == owners


def test_the_installed_service_is_enabled_and_has_a_user(linux: Service) -> None:
    expected = ["daemon-reload", "enable --now mlxrunner", "reload nginx", "restart mlxrunner"]
    # other tests run blocks of later sections
    assert linux.sandbox.get_calls("systemctl")[: len(expected)] == expected
    [user] = linux.sandbox.get_calls("useradd")
    assert user.split()[-1] == "mlxrunner"
    unit = (ROOT / "deploy/mlxrunner.service").read_text("utf-8")
    for line in ("User=mlxrunner", f"--api-keys {KEY_FILE}", f"ExecStart={PROGRAM} serve"):
        assert line in unit
    home = re.findall(r"--home-dir (\S+)", user)
    assert f"Environment=HOME={home[0]} " in unit


def test_the_arguments_of_the_installation_are_valid(
    linux: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox replaces deploy/install.py, so its arguments are checked here."""
    [call] = linux.sandbox.get_calls("python3")
    script, environment = call.split()
    assert (script, environment) == ("deploy/install.py", str(Path(PROGRAM).parents[1]))
    install = load_script()
    installed: list[Path] = []

    def record(installer: object, *_: object, **__: object) -> None:
        installed.append(getattr(installer, "environment"))  # noqa: B009  # loaded by its path

    monkeypatch.setattr(install, "install_packages", record)
    monkeypatch.setattr(install, "install_project", record)
    monkeypatch.setattr("sys.argv", [script, environment])
    assert install.main() == 0
    assert installed == [Path(environment)] * 2


def test_without_a_key_file_the_service_does_not_start(tmp_path: Path) -> None:
    sandbox = Sandbox.make(tmp_path)
    sandbox.run(read_blocks("Install")[0])
    sandbox.run(
        read_blocks("Linux with systemd")[0].replace(f"sudo chown mlxrunner {KEY_FILE}", "")
    )
    unit = sandbox.get_path("/etc/systemd/system/mlxrunner.service")
    unit.write_text(sandbox.relocate(unit.read_text("utf-8")), "utf-8")
    command, environment = read_unit(unit)
    process = subprocess.run(
        command,
        env={**sandbox.environment, **environment, "MLXRUNNER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert process.returncode == 1
    [line] = process.stderr.splitlines()
    assert "--api-keys" in line
    assert str(sandbox.get_path(KEY_FILE)) in line


# Models


def apply_model_settings(sandbox: Sandbox) -> str:
    """Changes the lines of the settings file as the section says. Returns the model's name."""
    section = GUIDE.read_text("utf-8").split("\n## Models\n")[1].split("\n## ")[0]
    [block] = re.findall(r"^```toml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    file = sandbox.get_path("/etc/mlxrunner/mlxrunner.toml")
    text = file.read_text("utf-8")
    for line in filter(None, block.splitlines()):
        start = re.escape(line.partition("=")[0])
        text, count = re.subn(rf"^#{start}.*$", line, text, count=1, flags=re.MULTILINE)
        assert count == 1, line
    file.write_text(text, "utf-8")
    [name] = re.findall(r'^name = "(.*)"$', block, re.MULTILINE)
    return name


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU env")
def test_the_service_serves_a_model_that_the_guide_pulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub has ended when the service starts, so the model comes from the service's cache."""
    sandbox = Sandbox.make(tmp_path)
    keys = follow_install(sandbox)
    sandbox.run(read_blocks("Linux with systemd")[0])
    create_service_folders(sandbox)
    name = apply_model_settings(sandbox)
    hub = StandIn()
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    for variable in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    try:
        hub.add(name, tiny.write(tmp_path / "model"))
        assert f"{name} is complete" in sandbox.run(read_blocks("Models")[0])
    finally:
        hub.close()
    cache = sandbox.get_path("/var/cache/mlxrunner/huggingface/hub")
    assert [path.name for path in cache.glob("models--*")] == [f"models--{name.replace('/', '--')}"]
    unit = sandbox.get_path("/etc/systemd/system/mlxrunner.service")
    unit.write_text(sandbox.relocate(unit.read_text("utf-8")), "utf-8")
    with run_command(*read_unit(unit), sandbox) as port:
        headers = {"Authorization": f"Bearer {keys['anna']}"}
        url = f"http://127.0.0.1:{port}/v1/models"
        models = httpx.get(url, headers=headers, timeout=TIMEOUT).json()["data"]
    assert [model["id"] for model in models] == [name]


# nginx


def test_clients_of_nginx_need_a_key(
    linux: Service, certificate: Certificate, tmp_path: Path
) -> None:
    """The configuration that the guide installs, with our port and certificate."""
    installed = linux.sandbox.get_path("/etc/nginx/conf.d/mlxrunner.conf")
    assert linux.sandbox.get_calls("nginx") == ["-t"]
    with run_nginx(installed, [linux], certificate, tmp_path) as nginx:
        for key, status in ((None, 401), ("mr-guessed", 401), (linux.keys["anna"], 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert nginx.send("GET", "/v1/models", headers=headers).status_code == status
            assert nginx.send("GET", "/metrics", headers=headers).status_code in (401, 403)
        assert nginx.send("GET", "/health").status_code == 200
        assert nginx.send("GET", "/health", headers={"Host": "other.example"}).status_code == 403


def test_the_host_name_of_nginx_is_that_of_the_settings(linux: Service) -> None:
    settings = linux.sandbox.get_path("/etc/mlxrunner/mlxrunner.toml").read_text("utf-8")
    assert f'\nallowed_hosts = ["{NAME}"]\n' in settings


# Prometheus


def test_prometheus_gets_a_key_of_its_own(linux: Service) -> None:
    """Added to the key file of the running server, which accepts it within a second."""
    [block] = read_blocks("Monitoring")
    linux.sandbox.run(block)
    key_file = linux.sandbox.get_path("/etc/prometheus/mlxrunner.key")
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    key = key_file.read_text("utf-8").strip()
    wait_until(lambda: linux.get_status("/metrics", key) == 200, limit=TIMEOUT)
    config = linux.sandbox.get_path("/etc/prometheus/prometheus.yml").read_text("utf-8")
    assert f"credentials_file: {linux.sandbox.root}/etc/prometheus/mlxrunner.key\n" in config
    assert 'targets: ["127.0.0.1:8080"]' in config


def check_with_promtool(config: Path) -> None:
    """Also checks the rules that the configuration names."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool: `apt-get install prometheus`")
    process = subprocess.run(
        [promtool, "check", "config", str(config)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert "rules found" in process.stdout


def test_promtool_accepts_the_configuration_of_the_guide(tmp_path: Path) -> None:
    sandbox = Sandbox.make(tmp_path)
    follow_install(sandbox)
    sandbox.run(read_blocks("Monitoring")[0])
    check_with_promtool(sandbox.get_path("/etc/prometheus/prometheus.yml"))


def test_promtool_accepts_the_configuration_of_compose(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "alerts.yml"):
        text = (ROOT / "deploy/prometheus" / name).read_text("utf-8")
        (tmp_path / name).write_text(text.replace("/secrets/prometheus/key", f"{tmp_path}/key"))
    (tmp_path / "key").write_text("mr-key")
    check_with_promtool(tmp_path / "prometheus.yml")


# macOS


def test_the_launchd_job_requires_keys(tmp_path: Path) -> None:
    sandbox = Sandbox.make(tmp_path)
    keys = follow_install(sandbox)
    [block] = read_blocks("macOS with launchd")
    sandbox.run(block)
    assert sandbox.get_calls("launchctl") == [
        "bootstrap system /Library/LaunchDaemons/org.mlxrunner.plist",
        "bootstrap system /Library/LaunchDaemons/org.mlxrunner.logs.plist",
    ]
    text = sandbox.get_path("/Library/LaunchDaemons/org.mlxrunner.plist").read_text("utf-8")
    job = plistlib.loads(sandbox.relocate(text).encode())
    assert job["UserName"] != "YOU"
    assert sandbox.get_calls("chown")[-1] == f"{job['UserName']} {KEY_FILE}"
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    with run_command(job["ProgramArguments"], environment, sandbox) as port:
        service = Service(sandbox, port, keys)
        statuses = [service.get_status("/v1/models", key) for key in (None, keys["anna"])]
        assert (statuses, service.get_status("/health")) == ([401, 200], 200)


# Docker


def test_the_commands_for_docker_exist_in_the_compose_file(tmp_path: Path) -> None:
    """test_compose.py runs what these services run."""
    sandbox = Sandbox.make(tmp_path)
    start, password = read_blocks("Docker")
    sandbox.run(start)
    sandbox.run(f"cd deploy\n{password}")
    assert sandbox.get_calls("docker") == [
        "compose up --detach",
        "compose run --rm key admin --admin",
        "compose exec grafana cat /secrets/grafana/password",
    ]


# The README


def test_the_readme_has_the_commands_of_the_guide() -> None:
    """Each line, in the order of the guide, and with a key."""
    readme = (ROOT / "README.md").read_text("utf-8").split("## Run it as a service")[1]
    [block, *_] = re.findall(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    guide = "".join(read_blocks("Install") + read_blocks("Linux with systemd")).splitlines()
    places = [guide.index(line.partition("  #")[0].rstrip()) for line in block.splitlines()]
    assert places == sorted(places)
    optional = {line for line in guide if "key anna" in line}
    assert set(guide) - {guide[place] for place in places} == optional


def test_each_section_with_commands_is_followed_here() -> None:
    text = GUIDE.read_text("utf-8")
    sections = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    with_commands = {
        heading
        for heading, body in zip(sections[1::2], sections[2::2], strict=True)
        if "```sh" in body
    }
    followed = set(re.findall(r'read_blocks\("([^"]+)"\)', Path(__file__).read_text("utf-8")))
    assert with_commands == followed
