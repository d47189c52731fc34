"""`mlxrunner key`: creates an API key, prints it once and stores its digest for the server.

Knows: the permissions of the key file, the way entries are appended to it. Must not know: the
format of the file, the permissions of keys.
"""

import datetime
import fcntl
import os
import stat
import sys
from pathlib import Path

from app.core.errors import AppError, ErrorKind
from app.core.usage import NO_LIMITS, UsageLimits
from app.http import api_keys


def make_key(
    name: str,
    *,
    admin: bool,
    file: Path | None,
    expires: datetime.date | None = None,
    limits: UsageLimits = NO_LIMITS,
) -> int:
    """Creates a key and returns the exit status. The key is printed on stdout and everything else
    on stderr, so that a program can read the key.

    file: the key file to which the digest is appended; None prints the entry instead. expires: the
    day, in UTC, from whose start the key is rejected; None means never. Raises
    AppError(INVALID) for an invalid name or an unusable file; no key is printed in this case.
    """
    fresh = api_keys.generate_key()
    end = None
    if expires is not None:
        end = datetime.datetime.combine(expires, datetime.time(), datetime.UTC).timestamp()
    key = api_keys.ApiKey(
        name=api_keys.validate_name(name),
        digest=api_keys.hash_key(fresh),
        admin=admin,
        expires=end,
        limits=limits,
    )
    table = api_keys.format_entry(key, f"created {datetime.date.today().isoformat()}")
    if file is None:
        message = (
            f"Save the key: it is not shown again. Add this to the --api-keys file:\n\n{table}"
        )
    else:
        before = append_key(file, table)
        message = f"Save the key: it is not shown again. Its digest was added to {file}."
        if any(other.name == key.name for other in before):
            message += f" {name}'s existing key stays valid until you remove it."
    print(fresh, flush=True)
    print(message, file=sys.stderr)
    return 0


def append_key(file: Path, table: str) -> tuple[api_keys.ApiKey, ...]:
    """Appends a table to the key file and returns the keys that the file held before.

    The file is created if it is missing. The table is appended by a single write, which is undone
    if it fails. A server that reads the file at this moment therefore sees all of the table or none
    of it. A lock ensures that two concurrent commands do not lose a key. The file keeps its owner,
    its comments and its links. Raises AppError(INVALID) if the file cannot be read or written.
    """
    try:
        # O_NONBLOCK, because opening a pipe would otherwise wait for its reader
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
    data = lead + table.encode()
    try:
        *before, _ = api_keys.parse_key_file((content + data).decode())
    except AppError as error:
        raise AppError(ErrorKind.INVALID, f"{file} {error.message}") from None
    except UnicodeDecodeError:
        raise AppError(ErrorKind.INVALID, f"{file} is not valid UTF-8") from None
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError("only part of it was written")
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    return tuple(before)


def _write_error(file: Path, error: OSError) -> AppError:
    why = (error.strerror or str(error)).lower()
    return AppError(ErrorKind.INVALID, f"{file} cannot be written: {why}")
