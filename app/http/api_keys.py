"""API keys: their format, the key file, and the lookup of a key that a client sends.

Knows: the file's format, the environment variables, digests. Must not know: HTTP, what a key
permits.

A key is stored as its SHA-256. Keys made by `mlxrunner key` have 256 random bits and cannot be
found by brute force, so a slow, salted password hash would protect nothing and would cost time in
every request.

The key file may change while the server runs; a keyring reloads it. The owner of a keyring is the
event loop; the file is read on a thread, because the disk may be slow.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings

log = logging.getLogger(__name__)

# Seconds between two checks of the file. A key that was removed from the file is rejected after
# this time.
_RELOAD_INTERVAL = 1.0

# Seconds that requests wait for a slow disk before the old keys are used.
_RELOAD_TIMEOUT = 1.0

# Bytes: ten thousand keys.
_MAX_FILE_BYTES = 4 << 20

# Metadata that changes with the file. The inode's change time also covers permissions.
FileStamp = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One API key. name: its owner; several keys may have the same name. digest: SHA-256 of the
    key. admin: whether it may load and unload models and read metrics."""

    name: str
    digest: bytes
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFileSnapshot:
    """The result of reading the key file. keys: its keys; None if the file cannot be used, and
    `error` contains the reason. warning: a problem that should be fixed but does not prevent
    use."""

    stamp: FileStamp
    keys: tuple[ApiKey, ...] | None
    error: str = ""
    warning: str = ""


class Keyring:
    """The valid keys. Whether keys are required is decided once at the start, so a lost or broken
    file never disables authentication."""

    def __init__(self, env_keys: tuple[ApiKey, ...] = (), file: Path | None = None) -> None:
        """env_keys: keys in addition to those of the file. Raises AppError(INVALID) if the file
        cannot be used."""
        self.enabled = bool(env_keys) or file is not None
        self._env_keys = env_keys
        self._file = file
        self._keys = env_keys
        self._stamp: FileStamp = ()
        self._reload_task: asyncio.Task[None] | None = None
        self._reloaded_at = float("-inf")
        if file is not None:
            snapshot = read_key_file(file)
            if snapshot.keys is None:
                raise AppError(ErrorKind.INVALID, f"--api-keys: {snapshot.error}", param="api_keys")
            self._keys = require_distinct((*env_keys, *snapshot.keys))
            self._remember(snapshot)

    @classmethod
    def from_settings(cls, settings: Settings, environment: MutableMapping[str, str]) -> Self:
        """Returns the keys of the environment, which are removed from it, and of the file in the
        settings. Raises AppError(INVALID)."""
        file = settings.api_keys
        return cls(load_env_keys(environment), None if file is None else Path(file))

    async def find(self, presented: str) -> ApiKey | None:
        """Returns the key that matches `presented`; None if none does. The file's content is at
        most a second old."""
        await self._reload_if_due()
        return find_key(self._keys, presented)

    async def _reload_if_due(self) -> None:
        if self._file is None:
            return
        now = asyncio.get_running_loop().time()
        if self._reload_task is None and now - self._reloaded_at >= _RELOAD_INTERVAL:
            self._reloaded_at = now
            self._reload_task = asyncio.create_task(self._reload(self._file))
        left = self._reloaded_at + _RELOAD_TIMEOUT - now
        if self._reload_task is not None and left > 0:
            # not `wait_for`: cancelling one waiter must not cancel the reload for the others
            await asyncio.wait({self._reload_task}, timeout=left)

    async def _reload(self, file: Path) -> None:
        try:
            snapshot = await asyncio.to_thread(read_if_changed, file, self._stamp)
            if snapshot is not None:
                self._apply(snapshot)
        finally:
            self._reload_task = None

    def _apply(self, snapshot: KeyFileSnapshot) -> None:
        problem = snapshot.error
        if snapshot.keys is not None:
            try:
                self._keys = require_distinct((*self._env_keys, *snapshot.keys))
            except AppError as error:
                problem = error.message
        self._remember(snapshot)
        if problem:
            log.error("--api-keys: %s; keeping the previous keys", problem)
        else:
            log.info("--api-keys: reloaded %s (%d keys)", self._file, len(self._keys))

    def _remember(self, snapshot: KeyFileSnapshot) -> None:
        self._stamp = snapshot.stamp
        if snapshot.warning:
            log.warning("--api-keys: %s", snapshot.warning)


def read_if_changed(file: Path, stamp: FileStamp) -> KeyFileSnapshot | None:
    """Reads the key file; returns None if it has not changed."""
    return None if _stat_stamp(file) == stamp else read_key_file(file)


def read_key_file(file: Path) -> KeyFileSnapshot:
    """Reads the key file. Blocks on the disk. Anyone who can write the file can add a key, so it is
    not used if another user has write permission."""
    # before reading, so that the next check notices a write during it
    seen = _stat_stamp(file)
    try:
        status = file.stat()
        # opening a pipe would block until it has a writer
        if not stat.S_ISREG(status.st_mode):
            raise AppError(ErrorKind.INVALID, "is not a regular file")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or _is_replaceable(file):
            raise AppError(ErrorKind.INVALID, f"is writable by other users: chmod 600 {file}")
        if status.st_size > _MAX_FILE_BYTES:
            raise AppError(ErrorKind.INVALID, f"is larger than {_MAX_FILE_BYTES:,} bytes")
        keys = parse_key_file(file.read_text("utf-8"))
    except AppError as error:
        return KeyFileSnapshot(stamp=seen, keys=None, error=f"{file} {error.message}")
    except UnicodeDecodeError:
        return KeyFileSnapshot(stamp=seen, keys=None, error=f"{file} is not valid UTF-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return KeyFileSnapshot(stamp=seen, keys=None, error=f"{file} cannot be read: {why}")
    readable = status.st_mode & (stat.S_IRGRP | stat.S_IROTH)
    warning = f"{file} is readable by other users: chmod 600 {file}"
    return KeyFileSnapshot(stamp=seen, keys=keys, warning=warning if readable else "")


def _is_replaceable(file: Path) -> bool:
    """Returns whether another user may replace the file."""
    mode = file.resolve().parent.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _stat_stamp(file: Path) -> FileStamp:
    try:
        status = os.stat(file)
    except OSError as error:
        return (-(error.errno or 1),)
    return (
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_size,
        status.st_ino,
        status.st_dev,
    )


KEY_VARIABLE, KEYS_VARIABLE = "MLXRUNNER_API_KEY", "MLXRUNNER_API_KEYS"

# name of the key in MLXRUNNER_API_KEY, for logs
ENV_KEY_NAME = "owner"

# Identifies keys of this server, for people and for tools that scan for leaked keys.
_KEY_PREFIX = "mr-"

# Names appear in logs and metric labels.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)

# RFC 6750, 2.1: the token after "Bearer"
_TOKEN_PATTERN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)

# Sixteen hexadecimal digits have 64 bits: too many for a brute-force attack over a network.
_MIN_KEY_CHARS = 16

_ENTRY_FIELDS = frozenset({"name", "sha256", "admin", "comment"})


def generate_key() -> str:
    """Returns a new random key."""
    return _KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def find_key(keys: Sequence[ApiKey], presented: str) -> ApiKey | None:
    """Returns the key that matches `presented`. Compares it with all keys, each in constant time,
    so that the duration reveals neither which key matched nor how much of it."""
    seen = hash_key(presented)
    found: ApiKey | None = None
    for key in keys:
        if hmac.compare_digest(key.digest, seen):
            found = key
    return found


def validate_name(name: str) -> str:
    """Returns the name. Raises AppError(INVALID) if it has other characters or is too long."""
    if _NAME_PATTERN.fullmatch(name) is None:
        raise AppError(
            ErrorKind.INVALID,
            f"{name[:100]!r} is not a valid key name: use up to 64 letters, digits and ._@-, "
            "beginning with a letter or a digit",
        )
    return name


def load_env_keys(variables: MutableMapping[str, str]) -> tuple[ApiKey, ...]:
    """Returns the keys of MLXRUNNER_API_KEY, one admin key, and MLXRUNNER_API_KEYS, any number of
    others as "name=key,name=key". Removes both variables, so that child processes do not inherit
    them. Raises AppError(INVALID), whose message never contains a key."""
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
    """Returns the keys of a TOML file: one table [[keys]] each, with name, sha256 and optionally
    admin and comment. Raises AppError(INVALID), whose message names the entry but contains none of
    its values."""
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
    """Returns the keys. Raises AppError(INVALID) if a key occurs twice, because it might have two
    scopes."""
    known: dict[bytes, ApiKey] = {}
    for key in keys:
        other = known.setdefault(key.digest, key)
        if other is not key:
            raise AppError(ErrorKind.INVALID, f"{other.name} and {key.name} have the same key")
    return tuple(known.values())


def format_entry(key: ApiKey, comment: str) -> str:
    """Returns a table for the file. comment: characters that need no escape."""
    lines = ["[[keys]]", f'name = "{key.name}"', f'sha256 = "{key.digest.hex()}"']
    if key.admin:
        lines.append("admin = true")
    return "\n".join([*lines, f'comment = "{comment}"', ""])


def _make_key(name: str, key: str, where: str, *, admin: bool) -> ApiKey:
    """Makes a key chosen by a user, after checking its strength."""
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
