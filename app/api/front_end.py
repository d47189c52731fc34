"""What the process that answers HTTP is busy with, besides connections: bodies, work on threads,
and how late its event loop is.

Knows: where these figures are kept, and how /v1/status spells them. Must not know: how they arise.
"""

from dataclasses import dataclass

from app.api.body import RequestBodies
from app.api.wire import JsonObject
from app.core.loop_lag import EventLoopLag
from app.core.workers import ThreadPools


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
