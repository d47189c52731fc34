"""Keeps a Mac from going to idle sleep while the server runs.

Knows: the program caffeinate. Must not know: requests, the engine.

`caffeinate -i` prevents idle sleep, and `-w` ends it with the server, even after a crash. The
display may still sleep, and so does a laptop whose lid is closed. Not run on a Mac.
"""

import logging
import os
import subprocess
import sys

from app.core.settings import Settings

log = logging.getLogger(__name__)

_CAFFEINATE = "/usr/bin/caffeinate"


def keep_awake(
    settings: Settings, *, system: str = sys.platform, program: str = _CAFFEINATE
) -> "subprocess.Popen[bytes] | None":
    """Starts the program, which ends with this process. Returns None if the option is off, on other
    systems, and if the program cannot be started."""
    if system != "darwin" or not settings.keep_awake:
        return None
    null = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            [program, "-i", "-w", str(os.getpid())], stdin=null, stdout=null, stderr=null
        )
    except OSError as error:
        log.warning("the machine may sleep during a response: %s", error)
        return None
