"""What a plan of who is in memory is made from, and what it says.

Knows: names, bytes, clock readings. Must not know: the policy (`app.runners.residency`), runners.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.core.residents import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A model in memory, or on its way in or out. Times are readings of one monotonic clock.

    share: bytes set aside for it. busy_since: when the oldest of the requests that hold it came to
    hold it; None while it is idle. used: when a request last began or ended to hold it. expires:
    when it may go if it is idle; math.inf for never. wanted: somebody waits for it, or it is to be
    here always. dismissed: it was asked to go, whether there is room or not. closed: by the last
    plan."""

    name: str
    phase: Literal["loading", "ready", "leaving"]
    share: int
    busy_since: float | None
    used: float
    expires: float
    wanted: bool
    pinned: bool
    dismissed: bool
    closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """A model that is waited for. since: how long. measured: whether `need` is known; the plan goes
    no further than to the first one whose need is not. need: None for a model that gets all there
    is. most: bytes that its owner allows it. evicts: whether others may go for it; what is loaded
    in good time, and not because somebody asked for it, takes room that is free."""

    name: str
    since: float
    measured: bool
    need: Need | None
    most: int | None
    evicts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """total: bytes for all models; None where there is but one. loaded: models at once. returning:
    the least bytes of models that had to go though nobody was done with them."""

    total: int | None
    loaded: int | None
    returning: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """share: bytes; None for all there is."""

    name: str
    share: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Now: it is idle, or its load is of no use to anybody."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """It cannot be loaded, whoever goes. why: a sentence for those who wait."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgo:
    """It is not loaded in good time: others would have to go for it."""

    name: str
    why: str


Action = Load | Evict | Refuse | Forgo


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """closed: models that take no new requests. wake: when there will be something to do though
    nothing happens until then; None for never."""

    actions: tuple[Action, ...]
    closed: frozenset[str]
    wake: float | None
