"""Whether a server may listen where it is told to, decided before it does.

Knows: addresses, and what stands between an address and strangers. Must not know: how keys are
checked, who listens.
"""

import ipaddress
from collections.abc import MutableMapping, Sequence

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.door.certificates import check_certificate
from app.door.keyring import Keyring


def check_security_settings(
    settings: Settings, environment: MutableMapping[str, str]
) -> tuple[Keyring, Sequence[str]]:
    """Checks keys, exposure and certificate, for `serve` before it listens and for `config`.
    Origins and host names are checked where they are parsed (`app.configuration.forms`). Removes
    the keys from `environment`. Returns the keys and warnings for the log. Raises AppError(INVALID)
    for settings with which a server does not start."""
    keyring = Keyring.from_settings(settings, environment)
    warnings = list(check_bind_policy(settings, has_keys=keyring.enabled))
    if settings.tls_cert is not None and settings.tls_key is not None:
        warnings += check_certificate(settings.tls_cert, settings.tls_key)
    return keyring, warnings


def check_bind_policy(settings: Settings, *, has_keys: bool) -> Sequence[str]:
    """Sentences for the log, for what is allowed and should be known. Raises AppError(INVALID) for
    a server that would serve strangers without anybody having said so."""
    if has_keys:
        if is_loopback(settings.host) or settings.tls_cert is not None:
            return ()
        return (
            f"listening on {settings.host} without TLS: keys and prompts are sent unencrypted "
            "unless a proxy or a tunnel encrypts them",
        )
    if "*" in settings.cors_origins and not settings.allow_anyone:
        raise AppError(
            ErrorKind.INVALID,
            "--cors-origin '*' without API keys lets any web page opened on this machine use the "
            "server: create a key with `mlxrunner key NAME --file FILE` and pass --api-keys FILE, "
            "or pass --allow-anyone",
            param="cors_origins",
        )
    named = [name for name in settings.allowed_hosts if not is_loopback(name)]
    if named and not settings.allow_anyone:
        raise AppError(
            ErrorKind.INVALID,
            f"--allowed-host {named[0]} without API keys lets anyone use the server who reaches "
            "it by that name, for example through a proxy, whose requests come from this machine: "
            "create a key with `mlxrunner key NAME --file FILE` and pass --api-keys FILE, or pass "
            "--allow-anyone",
            param="allowed_hosts",
        )
    if is_loopback(settings.host):
        return tuple(
            f"accepting requests for {name} without API keys: anyone who can reach it can use it"
            for name in named[:1]
        )
    if not settings.allow_anyone:
        raise AppError(
            ErrorKind.INVALID,
            f"listening on {settings.host} without API keys lets anyone who can reach it use the "
            "server: create a key with `mlxrunner key NAME --file FILE` and pass --api-keys FILE, "
            "or pass --allow-anyone",
            param="host",
        )
    return (f"listening on {settings.host} without API keys: anyone who can reach it can use it",)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name that is not `localhost` may be anything."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
