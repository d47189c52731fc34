"""The server of this machine, as its settings describe it.

Knows: the address in the settings, the variables that hold API keys. Must not know: requests.
"""

from collections.abc import Mapping

from app.core.settings import Settings

# the variable that holds the server's API key
KEY_VARIABLE = "MLXRUNNER_API_KEY"

# addresses that only programs on this machine reach, and those that mean every address
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_EVERY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # compared, not bound


def get_server_url(settings: Settings) -> str:
    """Returns the address at which programs on this machine reach the server."""
    host = _EVERY_ADDRESS.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def is_local(settings: Settings) -> bool:
    """Returns whether the address in the settings is one of this machine."""
    return settings.host in _LOOPBACK or settings.host in _EVERY_ADDRESS


def get_api_key(environment: Mapping[str, str]) -> str | None:
    """Returns the key of the environment: MLXRUNNER_API_KEY, else the first of
    MLXRUNNER_API_KEYS."""
    first, _, _ = environment.get("MLXRUNNER_API_KEYS", "").partition(",")
    return environment.get(KEY_VARIABLE, "").strip() or first.partition("=")[2].strip() or None
