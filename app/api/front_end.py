"""Load statistics of the HTTP process: request bodies, work on threads, event loop lag.

Knows: the sources of these statistics, their names in /v1/status. Must not know: how they are
measured.
"""

from dataclasses import dataclass

from app.core.thread_pools import ThreadPools
from app.core.usage import EventLoopLag
from app.http.body import RequestBodies
from app.http.responses import JsonObject


@dataclass(frozen=True, slots=True)
class FrontendStats:
    """The load statistics of one server."""

    bodies: RequestBodies
    workers: ThreadPools
    lag: EventLoopLag

    def render(self) -> JsonObject:
        """Returns the JSON object. LoopLag and LoopLagWorst are the current lag and the maximum lag
        in the last minute, in seconds. BodyBytes is the number of bytes that count against the
        memory budget."""
        return {
            "LoopLag": round(self.lag.latest, 4),
            "LoopLagWorst": round(self.lag.worst, 4),
            "Bodies": self.bodies.in_flight,
            "BodyBytes": self.bodies.reserved_bytes,
            "BodiesParsing": self.bodies.decoding,
            "WorkRunning": self.workers.running,
            "WorkQueued": self.workers.queued,
        }
