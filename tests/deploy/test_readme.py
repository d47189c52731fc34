"""The container commands of docs/clients.md and docs/operations.md, checked without Docker: they
are valid, and the server accepts their host names."""

import re
import shlex

from app.core.settings import ModelSettings
from app.http.host_and_origin import AllowedHosts, parse_host
from tests import test_dockerfile as image
from tests.deploy.command import check_start, parse_serve_command
from tests.server_process import ROOT

CLIENTS = (ROOT / "docs/clients.md").read_text("utf-8").replace("\\\n", " ")
OPERATIONS = (ROOT / "docs/operations.md").read_text("utf-8").replace("\\\n", " ")


def find_command(prefix: str, page: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(prefix)]
    return shlex.split(line)


def test_the_server_allows_the_host_name_of_open_webui() -> None:
    words = find_command(".venv/bin/mlxrunner serve --installed", CLIENTS)
    settings = check_start(parse_serve_command(words, {}), {})
    [address] = re.findall(r"OPENAI_API_BASE_URL=http://(\S+)/v1 -e", CLIENTS)
    name, _, port = address.partition(":")
    assert int(port) == settings.port
    assert parse_host(address) == name
    assert AllowedHosts.from_settings(settings).allows(name)


def test_the_container_without_keys_is_published_only_locally() -> None:
    words = find_command("docker run --init", OPERATIONS)
    index = words.index("mlxrunner")
    settings = parse_serve_command(image.entry(words[index + 1 :]), image.variables())
    check_start(settings, {})
    assert settings.allow_anyone
    assert settings.models == (ModelSettings(name="/models/some-llama"),)
    assert words[words.index("-p") + 1] == f"127.0.0.1:{settings.port}:{settings.port}"
