"""The settings of each client program, as `launch --print` shows them."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from app.commands.client_programs import (
    CLIENT_TIMEOUT,
    PROGRAMS,
    Endpoint,
    ProgramSettings,
    merge_environment,
)
from app.commands.launch import render_settings

FOLDER = Path("/temporary")
CONTEXT = 131_072
ENDPOINT = Endpoint(url="http://127.0.0.1:8080", model="org/model", context_length=CONTEXT)
WITH_KEY = Endpoint(
    url="http://127.0.0.1:8080", model="org/model", context_length=CONTEXT, api_key="mr-secret"
)


def configure(name: str, endpoint: Endpoint = ENDPOINT) -> ProgramSettings:
    return PROGRAMS[name].configure(endpoint, FOLDER)


def parse_codex_arguments(settings: ProgramSettings) -> Mapping[str, object]:
    """Codex parses each value as TOML."""
    import tomllib

    flags, pairs = settings.arguments[::2], settings.arguments[1::2]
    assert set(flags) == {"-c"}
    values: dict[str, object] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        values[name] = tomllib.loads(f"x = {value}")["x"]
    return values


def test_claude_gets_one_model_for_all_its_tasks():
    variables = configure("claude").variables
    names = [name for name in variables if name.endswith("_MODEL")]
    assert len(names) == 6
    assert {variables[name] for name in names} == {"org/model"}
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "131072"
    assert variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert variables["API_TIMEOUT_MS"] == str(1000 * CLIENT_TIMEOUT)


def test_claude_ignores_the_users_key_of_the_vendor():
    settings = configure("claude")
    merged = merge_environment({"ANTHROPIC_API_KEY": "sk-ant"}, settings, ENDPOINT)
    assert "ANTHROPIC_API_KEY" not in merged
    assert merged["ANTHROPIC_AUTH_TOKEN"]


def test_a_short_context_limits_the_response_and_omits_a_window_below_claudes_minimum():
    short = Endpoint(url="http://127.0.0.1:8080", model="m", context_length=32_768)
    variables = configure("claude", short).variables
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] is None
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"


def test_the_page_about_clients_lists_the_variables_of_claude():
    page = Path(__file__).parents[2] / "docs/clients.md"
    section = page.read_text("utf-8").split("## Claude Code and Anthropic's SDKs")[1]
    [block] = re.findall(r"```sh\n(export .*?)```", section, re.DOTALL)
    short = Endpoint(url="http://127.0.0.1:8080", model="m", context_length=32_768)
    variables = configure("claude", short).variables
    assert set(re.findall(r"\b(?:ANTHROPIC|API|CLAUDE)_[A-Z_]+", block)) == set(variables)
    assigned = dict(re.findall(r"(\w+)=(\S+)", block))
    for name, value in variables.items():
        assert assigned.get(name) in (value, "MODEL", "unused"), name
    assert set(re.findall(r"unset (\w+)", block)) == variables.keys() - assigned.keys()


def test_codex_gets_a_provider_of_the_responses_api():
    values = parse_codex_arguments(configure("codex"))
    assert values["model"] == "org/model"
    assert values["model_context_window"] == CONTEXT
    provider = f"model_providers.{values['model_provider']}"
    assert values[f"{provider}.wire_api"] == "responses"
    assert values[f"{provider}.base_url"] == "http://127.0.0.1:8080/v1"
    assert values[f"{provider}.stream_idle_timeout_ms"] == 1000 * CLIENT_TIMEOUT
    assert f"{provider}.env_key" not in values


def test_opencode_gets_its_configuration_in_a_variable():
    variables = configure("opencode").variables
    configuration = json.loads(variables["OPENCODE_CONFIG_CONTENT"] or "")
    [(name, provider)] = configuration["provider"].items()
    assert configuration["model"] == configuration["small_model"] == f"{name}/org/model"
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8080/v1"
    assert provider["options"]["apiKey"]
    assert provider["models"]["org/model"]["limit"] == {"context": CONTEXT, "output": 32_000}


def test_aider_gets_the_context_length_in_a_file():
    settings = configure("aider")
    assert settings.variables["AIDER_MODEL"] == "openai/org/model"
    assert settings.variables["OPENAI_API_BASE"] == "http://127.0.0.1:8080/v1"
    [(name, text)] = settings.files.items()
    assert settings.variables["AIDER_MODEL_METADATA_FILE"] == str(FOLDER / name)
    assert json.loads(text)["openai/org/model"]["max_input_tokens"] == CONTEXT


def test_cline_gets_a_settings_file_and_starts_no_daemon():
    settings = configure("cline")
    [(name, text)] = settings.files.items()
    assert settings.variables["CLINE_PROVIDER_SETTINGS_PATH"] == str(FOLDER / name)
    assert settings.variables["CLINE_SESSION_BACKEND_MODE"] == "local"
    assert settings.variables["CLINE_HUB_DISCOVERY_PATH"] == "/dev/null/hub.json"
    document = json.loads(text)
    provider = document["providers"][document["lastUsedProvider"]]["settings"]
    assert (provider["model"], provider["contextWindow"]) == ("org/model", CONTEXT)
    assert provider["baseUrl"] == "http://127.0.0.1:8080/v1"


def test_continue_gets_a_configuration_file():
    settings = configure("continue")
    [(name, text)] = settings.files.items()
    assert settings.arguments == ("--config", str(FOLDER / name))
    [model] = json.loads(text)["models"]
    assert (model["provider"], model["model"]) == ("openai", "org/model")
    assert model["defaultCompletionOptions"]["contextLength"] == CONTEXT


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_gets_the_api_key(name: str):
    settings = configure(name, WITH_KEY)
    places = [*settings.variables.values(), *settings.files.values()]
    assert any("mr-secret" in (place or "") for place in places)
    # other users can read the arguments of a process
    assert not any("mr-secret" in argument for argument in settings.arguments)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_printed_settings_hold_no_key(name: str):
    text = "\n".join(render_settings(PROGRAMS[name], WITH_KEY, ()))
    assert "mr-secret" not in text
    assert "MLXRUNNER_API_KEY" in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_printed_settings_are_a_shell_script_with_the_users_arguments(name: str):
    lines = list(render_settings(PROGRAMS[name], ENDPOINT, ("-p", "it's")))
    assert "org/model at http://127.0.0.1:8080" in lines[0]
    words = shlex.split(lines[-1])
    assert words[0] == PROGRAMS[name].executable
    assert words[-2:] == ["-p", "it's"]
    assert all(line.startswith(("#", "export ", "unset ")) for line in lines[:-1])


def test_requests_to_the_server_bypass_a_proxy():
    proxied = {"HTTPS_PROXY": "http://proxy", "NO_PROXY": "internal"}
    merged = merge_environment(proxied, configure("aider"), ENDPOINT)
    assert merged["NO_PROXY"] == "internal,127.0.0.1"
    assert merged["no_proxy"] == "internal,127.0.0.1"
    assert "NO_PROXY" not in merge_environment({}, configure("aider"), ENDPOINT)


@pytest.mark.parametrize(
    ("program", "setting"),
    [
        ("opencode", '"modalities": {"input": ["text", "image"], "output": ["text"]}'),
        ("aider", '"supports_vision": true'),
        ("continue", '"image_input"'),
    ],
)
def test_a_program_sends_images_only_to_a_model_that_processes_them(program: str, setting: str):
    def render(*, vision: bool) -> str:
        settings = configure(program, replace(ENDPOINT, vision=vision))
        return "\n".join(filter(None, [*settings.variables.values(), *settings.files.values()]))

    joined = " ".join(render(vision=True).split())
    assert setting in joined
    assert setting not in " ".join(render(vision=False).split())
