"""The container commands of docs/clients.md, docs/operations.md and docs/quickstart.md, checked
without Docker: they are valid, and the server accepts their host names."""

import re
import shlex

import pytest

from app.core.settings import ModelSettings
from app.http.host_and_origin import AllowedHosts, parse_host
from tests import test_dockerfile as image
from tests.deploy.command import check_start, parse_serve_command
from tests.server_process import ROOT

CLIENTS = (ROOT / "docs/clients.md").read_text("utf-8").replace("\\\n", " ")
OPERATIONS = (ROOT / "docs/operations.md").read_text("utf-8").replace("\\\n", " ")
QUICK_START = (ROOT / "docs/quickstart.md").read_text("utf-8")


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


NEW_VOLUME = "docker run --init -p 127.0.0.1:8080:8080 -v mlxrunner-models:/models mlxrunner"

CONTAINERS = [
    (OPERATIONS, "docker run --init", "/models/some-llama"),
    (QUICK_START, f"{NEW_VOLUME} --", None),
    (QUICK_START, f"{NEW_VOLUME} qwen", "qwen3:4b"),
]


@pytest.mark.parametrize(("page", "prefix", "model"), CONTAINERS)
def test_the_container_without_keys_is_published_only_locally(
    page: str, prefix: str, model: str | None
) -> None:
    words = find_command(prefix, page)
    index = words.index("mlxrunner")
    settings = parse_serve_command(image.entry(words[index + 1 :]), image.variables())
    check_start(settings, {})
    assert settings.allow_anyone
    assert settings.models == ((ModelSettings(name=model),) if model else ())
    assert words[words.index("-p") + 1] == f"127.0.0.1:{settings.port}:{settings.port}"
