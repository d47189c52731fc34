"""Ports for programs that cannot listen on any free one.

A port that the system chose for a probe may be given to another program as soon as the probe is
closed. The ports here are below those that systems choose from (32768 on Linux, 49152 on macOS), so
that only a program that asks for the same number can take one.
"""

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)


def find_free_port(count: int = 1) -> int:
    """Returns the first of `count` consecutive ports on which nothing listens."""
    while True:
        first = random.SystemRandom().choice(_PORTS)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
