"""API keys: what one is, how it is written down, how a key that a client shows is found.

Knows: the file's format, the environment's variables, digests. Must not know: HTTP, when the file
is read, what a key is good for.

A key is written down as its SHA-256. Keys that `mlxrunner key` makes have 256 random bits, which
nobody finds by trying, so that the slow and salted digests for passwords would protect nothing and
cost every request time.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from app.core.errors import AppError, ErrorKind

KEY_VARIABLE, KEYS_VARIABLE = "MLXRUNNER_API_KEY", "MLXRUNNER_API_KEYS"

# whom the key of MLXRUNNER_API_KEY belongs to, in logs
ENV_KEY_NAME = "owner"

# Tells a key of ours from others', for people and for programs that look for leaked ones.
_KEY_PREFIX = "mr-"

# A name stands in logs and in labels of metrics.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)

# RFC 6750, 2.1: what may stand behind "Bearer"
_TOKEN_PATTERN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)

# Digits of hexadecimals would have 64 bits: more than anyone tries over a network.
_MIN_KEY_CHARS = 16

_ENTRY_FIELDS = frozenset({"name", "sha256", "admin", "comment"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """name: whom it belongs to; several keys may have one name. digest: SHA-256 of the key. admin:
    it may load and unload models, and see figures."""

    name: str
    digest: bytes
    admin: bool = False


def generate_key() -> str:
    """A new key."""
    return _KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def find_key(keys: Sequence[ApiKey], presented: str) -> ApiKey | None:
    """The key that `presented` is. Compares it with all of them, each in constant time, so that how
    long it takes tells neither which one it was nor how much of it was right."""
    seen = hash_key(presented)
    found: ApiKey | None = None
    for key in keys:
        if hmac.compare_digest(key.digest, seen):
            found = key
    return found


def validate_name(name: str) -> str:
    """Raises AppError(INVALID)."""
    if _NAME_PATTERN.fullmatch(name) is None:
        raise AppError(
            ErrorKind.INVALID,
            f"{name[:100]!r} is not a valid key name: use up to 64 letters, digits and ._@-, "
            "beginning with a letter or a digit",
        )
    return name


def load_env_keys(variables: MutableMapping[str, str]) -> tuple[ApiKey, ...]:
    """MLXRUNNER_API_KEY, one key that may do everything, and MLXRUNNER_API_KEYS, any number of
    others, as "name=key,name=key". Both variables are taken out, so that no process which we start
    gets them. Raises AppError(INVALID), which never tells a key."""
    one, several = variables.pop(KEY_VARIABLE, ""), variables.pop(KEYS_VARIABLE, "")
    found = [_make_key(ENV_KEY_NAME, one.strip(), KEY_VARIABLE, admin=True)] if one.strip() else []
    listed = [entry for entry in several.split(",") if entry.strip()]
    for place, entry in enumerate(listed, 1):
        name, equals, key = entry.partition("=")
        if not equals:
            raise AppError(
                ErrorKind.INVALID, f"{KEYS_VARIABLE}: entry {place} is not of the form name=key"
            )
        found.append(
            _make_key(name.strip(), key.strip(), f"{KEYS_VARIABLE}: entry {place}", admin=False)
        )
    return require_distinct(found)


def parse_key_file(text: str) -> tuple[ApiKey, ...]:
    """The keys of a file: TOML, a table [[keys]] for each with name, sha256 and, where wanted,
    admin and comment. Raises AppError(INVALID), which names the entry and shows nothing of it."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise AppError(ErrorKind.INVALID, f"is not valid TOML: {error}") from None
    listed = content.pop("keys", None)
    if content:
        raise AppError(ErrorKind.INVALID, "contains something other than [[keys]] tables")
    if not isinstance(listed, list) or not listed:
        raise AppError(
            ErrorKind.INVALID, "contains no keys: `mlxrunner key NAME --file FILE` adds one"
        )
    entries = cast("list[object]", listed)
    return require_distinct(_parse_entry(value, place) for place, value in enumerate(entries, 1))


def require_distinct(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """Raises AppError(INVALID) where one key stands twice, and so might have two scopes."""
    known: dict[bytes, ApiKey] = {}
    for key in keys:
        other = known.setdefault(key.digest, key)
        if other is not key:
            raise AppError(ErrorKind.INVALID, f"{other.name} and {key.name} have the same key")
    return tuple(known.values())


def format_entry(key: ApiKey, comment: str) -> str:
    """A table for the file. comment: letters that need no escape."""
    lines = ["[[keys]]", f'name = "{key.name}"', f'sha256 = "{key.digest.hex()}"']
    if key.admin:
        lines.append("admin = true")
    return "\n".join([*lines, f'comment = "{comment}"', ""])


def _make_key(name: str, key: str, where: str, *, admin: bool) -> ApiKey:
    """A key that somebody chose: it may be a bad one."""
    if _NAME_PATTERN.fullmatch(name) is None:
        raise AppError(
            ErrorKind.INVALID,
            f"{where}: the name must be up to 64 letters, digits and ._@-, beginning with a letter "
            "or a digit",
        )
    if len(key) < _MIN_KEY_CHARS or _TOKEN_PATTERN.fullmatch(key) is None:
        raise AppError(
            ErrorKind.INVALID,
            f"{where}: the key must be at least {_MIN_KEY_CHARS} letters, digits and "
            "-._~+/ (= at the "
            "end); `mlxrunner key NAME` generates one",
        )
    return ApiKey(name=name, digest=hash_key(key), admin=admin)


def _parse_entry(value: object, place: int) -> ApiKey:
    if not isinstance(value, Mapping):
        raise AppError(ErrorKind.INVALID, f"key {place} is not a [[keys]] table")
    fields = cast("Mapping[str, Any]", value)
    if unknown := sorted(fields.keys() - _ENTRY_FIELDS):
        raise AppError(
            ErrorKind.INVALID,
            f"key {place}: unknown field {unknown[0][:50]!r}; the fields of a key are "
            f"{', '.join(sorted(_ENTRY_FIELDS))}",
        )
    name, sha256, admin = fields.get("name"), fields.get("sha256"), fields.get("admin", False)
    if not isinstance(name, str) or _NAME_PATTERN.fullmatch(name) is None:
        raise AppError(
            ErrorKind.INVALID, f"key {place}: name must be at most 64 letters, digits and ._@-"
        )
    if not isinstance(sha256, str) or re.fullmatch("[0-9a-fA-F]{64}", sha256) is None:
        raise AppError(
            ErrorKind.INVALID,
            f"key {place}: sha256 must be 64 hexadecimal digits, the key's SHA-256",
        )
    if not isinstance(admin, bool) or not isinstance(fields.get("comment", ""), str):
        raise AppError(
            ErrorKind.INVALID, f"key {place}: admin must be true or false, and comment a string"
        )
    return ApiKey(name=name, digest=bytes.fromhex(sha256), admin=admin)
