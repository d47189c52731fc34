"""What the process that answers HTTP is busy with, besides connections: bodies, work on threads,
and how late its event loop is.

Knows: where these figures are kept, and how /v1/status spells them. Must not know: how they arise.
"""

from dataclasses import dataclass

from app.core.server_stats import EventLoopLag
from app.core.thread_pools import ThreadPools
from app.http.body import RequestBodies
from app.http.responses import JsonObject


@dataclass(frozen=True, slots=True)
class FrontendStats:
    """Of one server."""

    bodies: RequestBodies
    workers: ThreadPools
    lag: EventLoopLag

    def render(self) -> JsonObject:
        """LoopLag and LoopLagWorst in seconds, now and in the last minute; BodyBytes as far as they
        count against the budget."""
        return {
            "LoopLag": round(self.lag.latest, 4),
            "LoopLagWorst": round(self.lag.worst, 4),
            "Bodies": self.bodies.in_flight,
            "BodyBytes": self.bodies.reserved_bytes,
            "BodiesParsing": self.bodies.parsing,
            "WorkRunning": self.workers.running,
            "WorkQueued": self.workers.queued,
        }
