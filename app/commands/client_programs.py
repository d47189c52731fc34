"""The coding agents that `mlxrunner launch` runs, and the settings that each of them requires.

Knows: the variables, flags and configuration files of each program. Must not know: processes, the
server.

Settings are passed in environment variables, flags and files in a temporary folder, so that the
user's own configuration of a program remains unchanged. Each program gets the server's address, the
model, the context length and a long timeout: a long prompt may take minutes on a local machine.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from app.config.options import KEY_VARIABLE

# the number of seconds that a program waits for a response
CLIENT_TIMEOUT = 1800

# most programs do not start without a key, even if the server requires none
_PLACEHOLDER_KEY = "mlxrunner"

# the name of the server in the configuration of a program
_PROVIDER = "mlxrunner"

# Claude Code treats a smaller window as this number of tokens
_MIN_AUTO_COMPACT_WINDOW = 100_000

# the share of the context that one response may use, so that a prompt still fits; and the number of
# tokens that is always sufficient
_RESPONSE_SHARE = 4
_MAX_RESPONSE = 32_000

# the share of the context at which Codex summarizes the conversation
_COMPACT_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The server and the model that a program uses. url: without a path. api_key: None if the
    server requires none. context_length: the number of positions in a sequence. vision: whether
    messages may have images."""

    url: str
    model: str
    context_length: int
    api_key: str | None = None
    vision: bool = False

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def key(self) -> str:
        return self.api_key or _PLACEHOLDER_KEY

    @property
    def key_variable(self) -> dict[str, str | None]:
        """The variable that holds the key, if there is a key."""
        return {} if self.api_key is None else {KEY_VARIABLE: self.api_key}

    @property
    def max_response(self) -> int:
        """The maximum number of tokens in one response."""
        return max(1, min(_MAX_RESPONSE, self.context_length // _RESPONSE_SHARE))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """The settings of a program. variables: environment variables; None unsets one. arguments:
    precede the user's arguments. files: the text of each file in the temporary folder, by name."""

    variables: Mapping[str, str | None]
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProgram:
    """A program. executable: the name of its command. installation: the command that installs it.
    configure: builds its settings; the path is that of the temporary folder, which may not exist
    yet."""

    name: str
    executable: str
    installation: str
    configure: Callable[[Endpoint, Path], ProgramSettings]


def merge_environment(
    environment: Mapping[str, str], settings: ProgramSettings, endpoint: Endpoint
) -> dict[str, str]:
    """Returns the environment of a program. Requests to the server bypass the user's proxy."""
    merged = dict(environment)
    for name, value in {**settings.variables, **_bypass_proxy(environment, endpoint)}.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def _bypass_proxy(environment: Mapping[str, str], endpoint: Endpoint) -> dict[str, str | None]:
    names = ("no_proxy", "NO_PROXY")
    if not any(name.lower().endswith("_proxy") for name in environment):
        return {}
    excepted = next((environment[name] for name in names if environment.get(name)), None)
    hosts = ",".join(filter(None, [excepted, urlsplit(endpoint.url).hostname]))
    return dict.fromkeys(names, hosts)


def _configure_claude(endpoint: Endpoint, folder: Path) -> ProgramSettings:
    model = endpoint.model
    tiers = ("OPUS", "SONNET", "HAIKU", "FABLE")
    long = endpoint.context_length >= _MIN_AUTO_COMPACT_WINDOW
    return ProgramSettings(
        variables={
            "ANTHROPIC_BASE_URL": endpoint.url,
            "ANTHROPIC_AUTH_TOKEN": endpoint.key,
            # with a key in this variable, Claude Code asks which of the two it should use
            "ANTHROPIC_API_KEY": None,
            "ANTHROPIC_MODEL": model,
            **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": model for tier in tiers},
            "CLAUDE_CODE_SUBAGENT_MODEL": model,
            # Claude Code assumes 200,000 tokens for a model that it does not know
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context_length),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.context_length) if long else None,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.max_response),
            # the first line of the prompt would differ in each conversation, and the reminder of
            # the remaining tokens in each turn
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": str(CLIENT_TIMEOUT * 1000),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(CLIENT_TIMEOUT * 1000),
        }
    )


def _configure_codex(endpoint: Endpoint, folder: Path) -> ProgramSettings:
    provider = f"model_providers.{_PROVIDER}"
    values: dict[str, str | int | bool] = {
        "model": endpoint.model,
        "model_provider": _PROVIDER,
        "model_context_window": endpoint.context_length,
        "model_auto_compact_token_limit": int(endpoint.context_length * _COMPACT_SHARE),
        # a hosted tool, which runs only at the vendor
        "web_search": "disabled",
        f"{provider}.name": _PROVIDER,
        f"{provider}.base_url": endpoint.openai_url,
        f"{provider}.wire_api": "responses",
        f"{provider}.stream_idle_timeout_ms": CLIENT_TIMEOUT * 1000,
        f"{provider}.supports_websockets": False,
    }
    if endpoint.api_key is not None:
        values[f"{provider}.env_key"] = KEY_VARIABLE
    # a JSON string, number or boolean is also a TOML value
    pairs = (("-c", f"{name}={json.dumps(value)}") for name, value in values.items())
    return ProgramSettings(
        variables=endpoint.key_variable,
        arguments=tuple(word for pair in pairs for word in pair),
    )


def _configure_opencode(endpoint: Endpoint, folder: Path) -> ProgramSettings:
    model = f"{_PROVIDER}/{endpoint.model}"
    key = endpoint.key if endpoint.api_key is None else f"{{env:{KEY_VARIABLE}}}"
    properties: dict[str, object] = {
        "name": endpoint.model,
        "tool_call": True,
        "limit": {"context": endpoint.context_length, "output": endpoint.max_response},
    }
    if endpoint.vision:
        properties["attachment"] = True
        properties["modalities"] = {"input": ["text", "image"], "output": ["text"]}
    configuration = {
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            _PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": _PROVIDER,
                "options": {
                    "baseURL": endpoint.openai_url,
                    "apiKey": key,
                    "timeout": CLIENT_TIMEOUT * 1000,
                },
                "models": {endpoint.model: properties},
            }
        },
    }
    return ProgramSettings(
        variables={
            **endpoint.key_variable,
            "OPENCODE_CONFIG_CONTENT": json.dumps(configuration),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
    )


def _configure_aider(endpoint: Endpoint, folder: Path) -> ProgramSettings:
    model = f"openai/{endpoint.model}"
    metadata = {
        model: {
            "max_input_tokens": endpoint.context_length,
            "max_output_tokens": endpoint.max_response,
            "max_tokens": endpoint.max_response,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
            **({"supports_vision": True} if endpoint.vision else {}),
        }
    }
    file = "models.json"
    return ProgramSettings(
        variables={
            "OPENAI_API_BASE": endpoint.openai_url,
            "OPENAI_API_KEY": endpoint.key,
            "AIDER_MODEL": model,
            "AIDER_WEAK_MODEL": model,
            "AIDER_EDITOR_MODEL": model,
            "AIDER_MODEL_METADATA_FILE": str(folder / file),
            "AIDER_TIMEOUT": str(CLIENT_TIMEOUT),
            "AIDER_SHOW_MODEL_WARNINGS": "false",
            "AIDER_CHECK_UPDATE": "false",
            # litellm would download the prices of models
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
        },
        files={file: _to_json(metadata)},
    )


def _configure_cline(endpoint: Endpoint, folder: Path) -> ProgramSettings:
    provider, file = "openai-compatible", "providers.json"
    settings = {
        "provider": provider,
        "apiKey": endpoint.key,
        "model": endpoint.model,
        "baseUrl": endpoint.openai_url,
        "contextWindow": endpoint.context_length,
        "maxTokens": endpoint.max_response,
        "timeout": CLIENT_TIMEOUT * 1000,
    }
    configured = {
        "settings": settings,
        "updatedAt": "1970-01-01T00:00:00.000Z",
        "tokenSource": "manual",
    }
    text = _to_json(
        {
            "version": 1,
            "lastUsedProvider": provider,
            "modes": {},
            "providers": {provider: configured},
        }
    )
    return ProgramSettings(
        variables={
            "CLINE_PROVIDER_SETTINGS_PATH": str(folder / file),
            # Otherwise a daemon would keep these settings after the program ends. In a terminal,
            # Cline starts the daemon in any mode, unless the daemon cannot write its address.
            "CLINE_SESSION_BACKEND_MODE": "local",
            "CLINE_HUB_DISCOVERY_PATH": f"{os.devnull}/hub.json",
        },
        files={file: text},
    )


def _configure_continue(endpoint: Endpoint, folder: Path) -> ProgramSettings:
    file = "config.yaml"
    model = {
        "name": endpoint.model,
        "provider": "openai",
        "model": endpoint.model,
        "apiBase": endpoint.openai_url,
        "apiKey": endpoint.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use", *(["image_input"] if endpoint.vision else [])],
        "contextLength": endpoint.context_length,
        "defaultCompletionOptions": {
            "contextLength": endpoint.context_length,
            "maxTokens": endpoint.max_response,
        },
        "requestOptions": {"timeout": CLIENT_TIMEOUT},
    }
    # JSON is also YAML
    text = _to_json({"name": _PROVIDER, "version": "1.0.0", "schema": "v1", "models": [model]})
    return ProgramSettings(
        variables={}, arguments=("--config", str(folder / file)), files={file: text}
    )


def _to_json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


PROGRAMS: Mapping[str, ClientProgram] = MappingProxyType(
    {
        program.name: program
        for program in (
            ClientProgram(
                name="claude",
                executable="claude",
                installation="npm install -g @anthropic-ai/claude-code",
                configure=_configure_claude,
            ),
            ClientProgram(
                name="codex",
                executable="codex",
                installation="npm install -g @openai/codex",
                configure=_configure_codex,
            ),
            ClientProgram(
                name="opencode",
                executable="opencode",
                installation="npm install -g opencode-ai",
                configure=_configure_opencode,
            ),
            ClientProgram(
                name="aider",
                executable="aider",
                installation="pipx install aider-chat",
                configure=_configure_aider,
            ),
            ClientProgram(
                name="cline",
                executable="cline",
                installation="npm install -g cline",
                configure=_configure_cline,
            ),
            ClientProgram(
                name="continue",
                executable="cn",
                installation="npm install -g @continuedev/cli",
                configure=_configure_continue,
            ),
        )
    }
)
