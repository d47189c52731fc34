"""Each configuration in the manual is loaded by the program that reads it, if it is installed here.

Settings of other programs are parsed, and each address of the server in them must answer.
"""

import json
import re
import shutil
import subprocess
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from app.config.precedence import resolve_config
from app.http.api_keys import parse_key_file
from tests.deploy.nginx import NAME
from tests.manual.blocks import Block, list_blocks
from tests.manual.check_nginx import main as check_nginx
from tests.server_process import ROOT, TIMEOUT, ServerProcess

BLOCKS = list_blocks("toml", "yaml", "json", "nginx", "caddyfile")

# Paths below an address of the server at which programs call it.
PATHS = ("", "/models", "/api/tags")


def load_toml(block: Block, folder: Path) -> None:
    """The settings of the server, or its keys."""
    if "keys" in tomllib.loads(block.text):
        assert parse_key_file(block.text)
        return
    file = folder / "mlxrunner.toml"
    file.write_text(block.text, "utf-8")
    assert resolve_config({}, str(file), {}).settings


def load_yaml(block: Block, folder: Path) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


def load_json(block: Block, folder: Path) -> None:
    """A list of ranks is read by MLX's launcher."""
    value = json.loads(block.text)
    if block.page == "docs/distributed.md":
        from mlx._distributed_utils.common import Hostfile

        file = folder / "hosts.json"
        file.write_text(block.text, "utf-8")
        with warnings.catch_warnings():
            # it leaves the file open
            warnings.simplefilter("ignore", ResourceWarning)
            assert len(Hostfile.from_file(file).hosts) == len(value)


def load_nginx(block: Block, folder: Path) -> None:
    """A part of a server, or a complete one."""
    if (program := shutil.which("nginx")) is None:
        pytest.skip("needs nginx: `apt-get install nginx-light`, `brew install nginx`")
    text = block.text
    if not re.search(r"^server \{", text, re.MULTILINE):
        text = f"server {{\nlisten 127.0.0.1:8443;\nserver_name {NAME};\n{text}}}\n"
    configuration = folder / "etc/nginx/conf.d"
    configuration.mkdir(parents=True)
    (configuration / "block.conf").write_text(text, "utf-8")
    assert check_nginx(folder, program) == 0


def load_caddyfile(block: Block, folder: Path) -> None:
    if (program := shutil.which("caddy")) is None:
        pytest.skip("needs caddy, which validates its configuration")
    (folder / "Caddyfile").write_text(block.text, "utf-8")
    subprocess.run([program, "adapt", "--config", str(folder / "Caddyfile")], check=True)


CONFIGURATION: dict[str, Callable[[Block, Path], None]] = {
    "toml": load_toml,
    "yaml": load_yaml,
    "json": load_json,
    "nginx": load_nginx,
    "caddyfile": load_caddyfile,
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_configuration_is_loaded(block: Block, tmp_path: Path) -> None:
    CONFIGURATION[block.language](block, tmp_path)


SETTINGS = [
    block for block in BLOCKS if re.search(r"http://(?:127\.0\.0\.1|localhost):8080", block.text)
]


@pytest.mark.parametrize(
    "block", [block for block in SETTINGS if block.language != "nginx"], ids=str
)
def test_the_addresses_in_the_settings_of_a_program_answer(
    block: Block, manual_server: ServerProcess
) -> None:
    """405 is the answer of a path that has only POST."""
    for path in re.findall(r"http://(?:127\.0\.0\.1|localhost):8080([^\s\"]*)", block.text):
        urls = [f"{manual_server.url}{path}{more}" for more in PATHS]
        statuses = [httpx.get(url, timeout=TIMEOUT).status_code for url in urls]
        assert {200, 405} & set(statuses), path


def test_the_lines_for_nginx_are_those_of_the_file() -> None:
    """The page omits the settings of its own server."""
    known = re.sub(r"\s+", " ", (ROOT / "deploy/nginx/one.conf").read_text("utf-8"))
    for block in list_blocks("nginx"):
        for line in block.text.splitlines():
            if line.strip() not in ("}", "proxy_pass http://127.0.0.1:8080;"):
                assert line.strip() in known, line


def test_each_kind_of_configuration_occurs() -> None:
    assert {block.language for block in BLOCKS} == set(CONFIGURATION)
