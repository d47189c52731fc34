"""What the process that answers HTTP is busy with, besides connections: bodies, work on threads,
and how late its event loop is.

Knows: where these figures are kept, and how /v1/status spells them. Must not know: how they arise.
"""

from dataclasses import dataclass

from app.api.body import RequestBodies
from app.api.wire import JsonObject
from app.core.loop_lag import LoopLag
from app.core.workers import Workers


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Of one server."""

    bodies: RequestBodies
    workers: Workers
    lag: LoopLag

    def status(self) -> JsonObject:
        """LoopLag and LoopLagWorst in seconds, now and in the last minute; BodyBytes as far as they
        count against the budget."""
        return {
            "LoopLag": round(self.lag.last, 4),
            "LoopLagWorst": round(self.lag.worst, 4),
            "Bodies": self.bodies.in_flight,
            "BodyBytes": self.bodies.memory,
            "BodiesParsing": self.bodies.parsing,
            "WorkRunning": self.workers.running,
            "WorkQueued": self.workers.queued,
        }
