"""`mlxrunner key`: makes an API key, shows it once, and writes down what the server needs of it.

Knows: the file's permissions, how lines are added to it. Must not know: the file's format, what
keys are good for.
"""

import datetime
import fcntl
import os
import stat
import sys
from pathlib import Path

from app.core.errors import AppError, ErrorKind
from app.http import api_keys


def make_key(name: str, *, admin: bool, file: Path | None) -> int:
    """The exit status. The key goes to stdout and everything else to stderr, so that a program may
    take it. Raises AppError(INVALID) for a name that is none, and for a file that cannot be used;
    then there is no key."""
    fresh = api_keys.generate_key()
    key = api_keys.ApiKey(
        name=api_keys.validate_name(name), digest=api_keys.hash_key(fresh), admin=admin
    )
    table = api_keys.format_entry(key, f"created {datetime.date.today().isoformat()}")
    if file is None:
        told = f"Save the key: it is not shown again. Add this to the --api-keys file:\n\n{table}"
    else:
        before = append_key(file, table)
        told = f"Save the key: it is not shown again. Its digest was added to {file}."
        if any(other.name == key.name for other in before):
            told += f" {name} has another key in it, which stays valid until you remove it."
    print(fresh, flush=True)
    print(told, file=sys.stderr)
    return 0


def append_key(file: Path, table: str) -> tuple[api_keys.ApiKey, ...]:
    """Adds a table to the file, which is made where there is none; the keys that it held before.

    It is written in one piece behind what stands there, and taken back if that fails, so that a
    server which looks at it just now reads all of it or nothing; and under a lock, so that two
    commands at once lose no key. It keeps its owner, its comments, and what links to it. Raises
    AppError(INVALID)."""
    try:
        # a pipe would wait for its reader
        line = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise _write_error(file, error) from None
    try:
        fcntl.flock(line, fcntl.LOCK_EX)
        return _append_locked(line, file, table)
    except OSError as error:
        raise _write_error(file, error) from None
    finally:
        os.close(line)


def _append_locked(descriptor: int, file: Path, table: str) -> tuple[api_keys.ApiKey, ...]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise AppError(ErrorKind.INVALID, f"{file} is not a file")
    size = status.st_size
    content = os.pread(descriptor, size, 0)
    lead = b"" if not content else b"\n" if content.endswith(b"\n") else b"\n\n"
    whole = lead + table.encode()
    try:
        *before, _ = api_keys.parse_key_file((content + whole).decode())
    except AppError as error:
        raise AppError(ErrorKind.INVALID, f"{file} {error.message}") from None
    except UnicodeDecodeError:
        raise AppError(ErrorKind.INVALID, f"{file} is not valid UTF-8") from None
    try:
        if os.write(descriptor, whole) != len(whole):
            raise OSError("only a part was written")
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    return tuple(before)


def _write_error(file: Path, error: OSError) -> AppError:
    why = (error.strerror or str(error)).lower()
    return AppError(ErrorKind.INVALID, f"{file} cannot be written: {why}")
