"""The identity of the compiled extension, which is constant during the lifetime of a server.

Knows: the files that the build of models/kernels installs. Must not know: MLX, operations.

The extension changes the bits of logits. A server starts model processes throughout its lifetime:
when it loads a model, and when it replaces a process. If `make` compiles the kernels in the
meantime, a later process would compute with different kernels than an earlier one. Therefore the
server pins the identity, and its model processes compare. If the server was started without the
extension, they do not use it. If the files differ, the process exits with an error that asks for a
restart of the server.
"""

import hashlib
import sysconfig
from collections.abc import Mapping
from pathlib import Path

# It lacks the prefix of settings because it is not an option.
VARIABLE = "_MLXRUNNER_EXTENSION"

FOLDER = Path(__file__).with_name("kernels")

CHANGED = "the compiled CPU kernels changed after the server was started: restart the server"
BUILT_LATER = "the CPU kernels were compiled after the server was started; restart the server"

_NAMES = (f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}", "libmlxrunner_blas.so")


class ExtensionChangedError(OSError):
    """The files differ from those that the server found. This is an OSError, because callers
    already report OSErrors of the backend."""


def compute_identity(folder: Path = FOLDER) -> str:
    """Returns the value of VARIABLE for the files of a folder. It names the folder, so that it does
    not apply to a different installation."""
    digest, has_files = hashlib.sha256(), False
    for name in _NAMES:
        try:
            content = (folder / name).read_bytes()
        except OSError:
            continue
        has_files = True
        digest.update(f"{name} {len(content)} ".encode() + content)
    return f"{folder} {digest.hexdigest() if has_files else 'none'}"


def may_use(environ: Mapping[str, str], *, current: str, folder: Path = FOLDER) -> bool:
    """Returns whether this process may use the extension. current: the result of
    `compute_identity`. Raises ExtensionChangedError."""
    pinned = environ.get(VARIABLE, "")
    pinned_folder, _, digest = pinned.rpartition(" ")
    if pinned_folder != str(folder) or pinned == current:
        return True
    if digest == "none":
        return False
    raise ExtensionChangedError(CHANGED)


# computed during the import, before the extension is loaded
IDENTITY = compute_identity()
