"""The container commands of docs/clients.md and docs/operations.md, checked without Docker: they
would start, and the server accepts the host names that they use."""

import re
import shlex

from app.core.settings import ModelSettings
from app.http.host import AllowedHosts, parse_host
from tests import test_dockerfile as image
from tests.deploy.command import settings_of, would_start
from tests.server_process import ROOT

CLIENTS = (ROOT / "docs/clients.md").read_text("utf-8").replace("\\\n", " ")
OPERATIONS = (ROOT / "docs/operations.md").read_text("utf-8").replace("\\\n", " ")


def line_with(beginning: str, page: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(beginning)]
    return shlex.split(line)


def test_open_webui_finds_a_server_that_answers_to_the_name_it_uses() -> None:
    words = line_with(".venv/bin/mlxrunner serve --installed", CLIENTS)
    settings = would_start(settings_of(words, {}), {})
    [address] = re.findall(r"OPENAI_API_BASE_URL=http://(\S+)/v1 -e", CLIENTS)
    name, _, port = address.partition(":")
    assert int(port) == settings.port
    assert parse_host(address) == name
    assert AllowedHosts.from_settings(settings).allows(name)


def test_the_container_that_anyone_may_call_is_published_to_this_machine() -> None:
    words = line_with("docker run --init", OPERATIONS)
    at = words.index("mlxrunner")
    settings = settings_of(image.entry(words[at + 1 :]), image.variables())
    would_start(settings, {})
    assert settings.allow_anyone
    assert settings.models == (ModelSettings(name="/models/some-llama"),)
    assert words[words.index("-p") + 1] == f"127.0.0.1:{settings.port}:{settings.port}"
