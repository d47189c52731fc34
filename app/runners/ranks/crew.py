"""The other ranks, as rank 0 has them: told what to do, missed when they are gone.

Knows: lines, threads that read them. Must not know: HTTP, asyncio, what a model is made of.

Each line is read on a thread of its own. Whoever computes a sum with a rank that is gone waits for
ever, or gets an error that names nobody: so the loss of one is the end of all, told by name at
once. The process must end, then; if it hangs on its way out, it is ended.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.requests import Grammar
from app.core.settings import Settings
from app.engine.grammar import Grammars, Matcher
from app.engine.ranks import Ranks
from app.runners.ranks.launch import Launch
from app.runners.ranks.line import Compile, Compiled, Down, Hello, Line, Lost, Stop, Welcome
from app.runners.ranks.meeting import WORDS, Meeting, met, traits_of

log = logging.getLogger(__name__)

# seconds in which all others must have said hello, and each that has connected
_GATHERING, _HELLO = 60.0, 5.0

# seconds that others may take for a grammar longer than rank 0 did
_COMPILING = 20.0

# seconds in which the process must have ended once a rank was lost
_LAST_WORDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of the other ranks."""

    rank: int
    host: str
    line: Line

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


class Crew:
    """ranks: for the engine."""

    def __init__(self, ranks: Ranks, members: Mapping[int, Member]) -> None:
        self.ranks = ranks
        self._members = members
        self._listeners: list[Callable[[str], None]] = []
        self._changed = threading.Condition()
        self._compiled: dict[int, int] = {}  # by number, by how many of the others
        self._numbers = 0
        self._why: str | None = None
        self._dismissed = self._engaged = False
        for member in self._members.values():
            name = f"rank-{member.rank}"
            threading.Thread(target=self._listen, args=(member,), name=name, daemon=True).start()

    def engage(self, lost: Callable[[str], None]) -> None:
        """For the one engine that the others load their parts with. lost: see `when_lost`. Raises
        AppError(ENGINE) for another one: they load once."""
        if self._engaged:
            raise AppError(
                Kind.ENGINE,
                "the model is split across ranks and cannot be loaded again: restart all ranks",
            )
        self._engaged = True
        self.when_lost(lost)

    def when_lost(self, listener: Callable[[str], None]) -> None:
        """To be told, on another thread and once, why nobody can be served any more."""
        with self._changed:
            self._listeners.append(listener)
            why = self._why
        if why is not None:
            listener(why)

    def tell(self, words: Down) -> None:
        for member in self._members.values():
            member.line.tell(words)

    def lost(self, within: float = 0.0) -> str | None:
        """Why nobody can be served any more, if that comes out within so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._why is not None, within)
            return self._why

    def lose(self, why: str) -> None:
        """All is over. Only the first reason counts, and none once all were dismissed."""
        with self._changed:
            if self._why is not None or self._dismissed:
                return
            self._why = why
            self._changed.notify_all()
            listeners = list(self._listeners)
        log.error("%s", why)
        _end_within(_LAST_WORDS)
        for listener in listeners:
            listener(why)

    def dismiss(self) -> None:
        """They are not needed any more, and end. May be called again."""
        with self._changed:
            self._dismissed = True
        self.tell(Stop())
        for member in self._members.values():
            member.line.hang_up()

    def compile(self, grammars: Grammars, grammar: Grammar, stop_ids: frozenset[int]) -> Matcher:
        """As `Grammars.compile`; returns when the others have it too, so that nobody's answer waits
        for it. Not to be called on the engine's thread."""
        with self._changed:
            number = self._numbers = self._numbers + 1
            self._compiled[number] = 0
        self.tell(Compile(number=number, grammar=grammar, stop_ids=stop_ids))
        try:
            matcher = grammars.compile(grammar, stop_ids)
            with self._changed:
                everybody = self._changed.wait_for(
                    lambda: self._why or self._compiled[number] == len(self._members), _COMPILING
                )
        finally:
            with self._changed:
                del self._compiled[number]
        if not everybody:
            slow = "the other ranks did not compile the grammar in time; try again in a moment"
            raise AppError(Kind.BUSY, slow, retry_after=round(_COMPILING))
        return matcher

    def _listen(self, member: Member) -> None:
        for words in member.line.answers():
            match words:
                case Compiled():
                    self._note(words.number)
                case Lost():
                    self.lose(f"{member}: {words.why}")
                case Hello():
                    self.lose(f"{member} sent a second hello")
        member.line.close()
        self.lose(f"{member} disconnected: its process exited or is unreachable")

    def _note(self, number: int) -> None:
        with self._changed:
            if number in self._compiled:  # else nobody waits for it any more
                self._compiled[number] += 1
                self._changed.notify_all()


def assemble(launch: Launch, files: ModelFiles, settings: Settings) -> Crew:
    """Wait for the other ranks; see `app.engine.ranks.joined`.

    Raises AppError for one that cannot be reached, or has another model, version or setting."""
    ranks = met(launch)
    with _listening(launch) as server:
        meeting = Meeting(
            secret=secrets.token_hex(16), port=server.getsockname()[1], host=socket.gethostname()
        )
        ranks.told(meeting.written(), WORDS)
        members = _gathered(server, meeting, launch, traits_of(files, settings))
    log.info("rank 0 of %d: connected to %s", launch.size, ", ".join(map(str, members.values())))
    return Crew(ranks, members)


def _listening(launch: Launch) -> socket.socket:
    host = launch.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def _gathered(
    server: socket.socket, meeting: Meeting, launch: Launch, traits: Mapping[str, str]
) -> dict[int, Member]:
    members = dict[int, Member]()
    deadline = time.monotonic() + _GATHERING
    while len(members) < launch.size - 1:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connected, _ = server.accept()
        except TimeoutError:
            missing = set(range(1, launch.size)) - members.keys()
            raise AppError(
                Kind.ENGINE,
                f"rank {min(missing)} joined the group but cannot connect to port "
                f"{meeting.port} of {launch.host or meeting.host}: open it in the firewall",
            ) from None
        line = Line(connected)
        line.patient(_HELLO)
        hello = line.greeting()
        # whoever does not know the secret is not one of us
        if hello is None or not secrets.compare_digest(
            hello.secret.encode(), meeting.secret.encode()
        ):
            line.close()
            continue
        line.patient(None)
        member = Member(rank=hello.rank, host=hello.host, line=line)
        refused = _difference(member, hello.traits, traits)
        line.tell(Welcome(refused=refused))
        if refused is not None:
            line.close()
            raise AppError(Kind.INVALID, refused)
        members[hello.rank] = member
    return members


def _difference(member: Member, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str | None:
    for name, value in ours.items():
        if theirs.get(name) != value:
            return (
                f"{member} has {name} {theirs.get(name)}, and rank 0 has {value}: all ranks must "
                "have the same"
            )
    return None


def _end_within(seconds: float) -> None:
    """A thread that waits for a sum cannot be told to stop, nor can MLX be left while it does."""

    def end() -> None:
        time.sleep(seconds)
        log.error("the process did not exit in time: killing it")
        os._exit(1)

    threading.Thread(target=end, name="forced-exit", daemon=True).start()
