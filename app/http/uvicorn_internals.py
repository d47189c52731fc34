"""The undocumented uvicorn APIs that this project uses. No other module uses them directly.

Knows: the names that other modules of app/http need, how uvicorn uses them. Must not know: why
other modules need them.

`UNDOCUMENTED` lists every name, so that a test can report names removed by a new version.
pyproject.toml restricts the supported versions.
"""

import asyncio
from asyncio.sslproto import SSLProtocol, _SSLProtocolTransport  # pyright: ignore[reportPrivateUsage]
from collections.abc import Sequence
from socket import SocketType

import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

__all__ = [
    "CLOSE_HEADER",
    "HookedFlowControl",
    "HookedH11Protocol",
    "HookedServer",
    "RequestResponseCycle",
    "ServerState",
    "get_buffer_size_below_tls",
]

# maps a class to attributes of the class or its instances
UNDOCUMENTED: Sequence[tuple[type, Sequence[str]]] = (
    (uvicorn.Server, ("_log_started_message", "_captured_signals", "capture_signals")),
    (uvicorn.Server, ("handle_exit", "startup", "shutdown", "servers", "server_state")),
    (H11Protocol, ("_unsupported_upgrade_warning", "_unset_keepalive_if_required")),
    (H11Protocol, ("handle_events", "on_response_complete", "timeout_keep_alive_handler")),
    (
        H11Protocol,
        ("conn", "cycle", "flow", "transport", "app", "client", "timeout_keep_alive_task"),
    ),
    (RequestResponseCycle, ("transport", "keep_alive", "response_started", "response_complete")),
    (FlowControl, ("_transport", "pause_reading", "resume_reading", "read_paused", "write_paused")),
    (ServerState, ("tasks", "connections")),
    (SSLProtocol, ("_transport",)),
    (_SSLProtocolTransport, ("_ssl_protocol",)),
)


class HookedServer(uvicorn.Server):
    def log_listening(self, listeners: Sequence[SocketType]) -> None:
        """Called when the sockets are listening, to replace uvicorn's log line."""
        raise NotImplementedError

    def record_signal(self, number: int) -> int:
        """Returns the number of signals so far, including this one. uvicorn raises the signals
        again when it exits."""
        self._captured_signals.append(number)
        return len(self._captured_signals)

    def _log_started_message(self, listeners: Sequence[SocketType]) -> None:
        self.log_listening(listeners)


class HookedH11Protocol(H11Protocol):
    def stop_keep_alive_timer(self) -> None:
        self._unset_keepalive_if_required()

    def _unsupported_upgrade_warning(self) -> None:
        """Suppresses uvicorn's log lines. Java's HTTP client offers an upgrade to HTTP/2 with its
        first request, and an HTTP/1.1 response is correct."""


class HookedFlowControl(FlowControl):
    @property
    def transport(self) -> asyncio.Transport:
        return self._transport


def get_buffer_size_below_tls(transport: asyncio.Transport) -> int:
    """Returns the number of encrypted bytes that are not in the kernel yet, which asyncio's TLS
    transport does not count. Returns 0 without TLS and on a closed connection."""
    protocol = getattr(transport, "_ssl_protocol", None)
    below: asyncio.Transport | None = getattr(protocol, "_transport", None)
    return 0 if below is None else below.get_write_buffer_size()
