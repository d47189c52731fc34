"""What all ranks but the first run: they load their part, and take every step that rank 0 takes.

Knows: the loop, a line, signals. Must not know: HTTP, text. The main thread reads the line and
handles signals; the engine has a thread of its own, as everywhere.

Rank 0 decides when all end. A rank that was told to end by itself waits for that a while, because
whoever stops several processes at once tells all of them, and answers may still be on their way.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Generator
from types import FrameType

from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.settings import Settings
from app.engine.grammar import Grammars, Matcher
from app.engine.load import load
from app.engine.loop import Loop
from app.engine.ranks import Ranks
from app.engine.thread import error_text, give_back
from app.runners.ranks.launch import Launch, when_launcher_ends
from app.runners.ranks.line import (
    Cancel,
    Command,
    Compile,
    Compiled,
    Embed,
    Hello,
    Line,
    Lost,
    Stop,
    Submit,
    Turn,
    Welcome,
)
from app.runners.ranks.meeting import WORDS, Meeting, met, traits_of
from app.runners.ranks.said import Said

log = logging.getLogger(__name__)

# seconds for the line to rank 0, once it is known where it waits
_CONNECTING = 30.0

# seconds beyond `Settings.drain` that rank 0 may take to end, when all were told to
_GRACE = 15.0

# seconds that a step may take to end
_LAST_STEP = 30.0

_DIFFERS = (
    "its results differ from those of rank 0 for the same requests, so they cannot compute "
    "together; this is a bug in mlxrunner or a hardware fault"
)
_STEP_FAILED = "a step failed on this rank; its log has the error"


def follow(launch: Launch, files: ModelFiles, settings: Settings) -> int:
    """Until rank 0 stops; the exit status. Raises AppError where rank 0 will not have us. Where it
    is lost, the process ends here and now: it may wait for a sum that nobody will ever add to."""
    ranks = met(launch)
    line = _connected(launch, ranks, files, settings)
    follower = _Follower(line, ranks, files, settings)
    with _leaving_with_rank_0(settings):
        ended_well = follower.run()
    line.close()
    if ended_well:
        return 0
    logging.shutdown()
    os._exit(1)


def _connected(launch: Launch, ranks: Ranks, files: ModelFiles, settings: Settings) -> Line:
    meeting = Meeting.read(ranks.told(b"", WORDS))
    own = socket.gethostname()
    host = launch.host or ("127.0.0.1" if meeting.host == own else meeting.host)
    try:
        line = Line(socket.create_connection((host, meeting.port), timeout=_CONNECTING))
    except OSError as error:
        raise AppError(
            Kind.ENGINE, f"cannot connect to rank 0 at {host}, port {meeting.port}: {error}"
        ) from error
    line.patient(_CONNECTING)
    traits = traits_of(files, settings)
    line.answer(Hello(secret=meeting.secret, rank=launch.rank, host=own, traits=traits))
    match next(line.told(), None):
        case Welcome(refused=None):
            line.patient(None)
            return line
        case Welcome(refused=why):
            line.close()
            raise AppError(Kind.INVALID, f"refused by rank 0: {why}")
        case _:
            line.close()
            raise AppError(Kind.ENGINE, "rank 0 disconnected")


class _Follower:
    def __init__(self, line: Line, ranks: Ranks, files: ModelFiles, settings: Settings) -> None:
        self._line = line
        self._ranks = ranks
        self._files = files
        self._settings = settings
        self._grammars = Grammars.of(files)
        self._grammars.start()
        self._gave_up = False  # written by the engine's thread
        self._turns: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._engine = threading.Thread(target=self._run, name="mlx-engine", daemon=True)

    def run(self) -> bool:
        """Whether it ended because rank 0 wanted it so."""
        self._engine.start()
        for words in self._line.told():
            match words:
                case Turn():
                    self._turns.put(words)
                case Compile():
                    threading.Thread(target=self._compile, args=(words,), daemon=True).start()
                case Stop():
                    log.info("rank %d: stopped by rank 0", self._ranks.rank)
                    self._turns.put(None)
                    self._engine.join(_LAST_STEP)
                    return not self._engine.is_alive()
                case Welcome():
                    pass
        if not self._gave_up:
            log.error("rank %d: rank 0 disconnected; exiting", self._ranks.rank)
        return False

    def _run(self) -> None:
        """The engine's thread. Whatever ends it too early is told to rank 0, and ends the line."""
        try:
            self._live()
        except AppError as error:
            self._give_up(error.message)
        except Exception as error:
            log.exception("rank %d: the engine failed", self._ranks.rank)
            self._give_up(error_text(error))
        finally:
            give_back()

    def _live(self) -> None:
        loop = load(self._files, self._settings, lambda done, memory: None, self._ranks)
        log.info(
            "rank %d of %d is ready (process %d)", self._ranks.rank, self._ranks.size, os.getpid()
        )
        said = Said()
        while (turn := self._turns.get()) is not None:
            if turn.said != said.checksum:
                raise AppError(Kind.ENGINE, _DIFFERS)
            for command in turn.commands:
                self._carry_out(command, loop)
            step = loop.step()
            if loop.faults:
                raise AppError(Kind.ENGINE, _STEP_FAILED)
            said.add(step)

    def _carry_out(self, command: Command, loop: Loop) -> None:
        match command:
            case Submit(job=job):
                loop.submit(job, self._matcher(command))
            case Embed(job=job):
                loop.embed(job)
            case Cancel(job=job, keep=keep):
                loop.cancel(job, keep=keep)

    def _matcher(self, command: Submit) -> Matcher | None:
        """Compiled already, when rank 0 did the same."""
        job = command.job
        return job.grammar and self._grammars.compile(job.grammar, job.stop_ids)

    def _compile(self, words: Compile) -> None:
        """Only to have it when it is wanted. What is wrong with it is told by rank 0."""
        try:
            self._grammars.compile(words.grammar, words.stop_ids)
        except AppError as error:
            log.info("rank %d: %s", self._ranks.rank, error.message)
        self._line.answer(Compiled(number=words.number))

    def _give_up(self, why: str) -> None:
        self._gave_up = True
        log.error("rank %d: %s", self._ranks.rank, why)
        self._line.answer(Lost(why=why))
        self._line.hang_up()


@contextlib.contextmanager
def _leaving_with_rank_0(settings: Settings) -> Generator[None]:
    """Told to end, or without whoever started all, wait for rank 0 to end; told again, end. That
    the launcher is gone counts as nothing that was told: it dies of what all are told at once, and
    may have died of it before this process hears."""
    patience: list[threading.Timer] = []
    told: list[int] = []

    def end_later(status: int) -> None:
        timer = threading.Timer(settings.drain + _GRACE, os._exit, (status,))
        timer.daemon = True
        patience.append(timer)
        timer.start()

    def handle(number: int, _: FrameType | None) -> None:
        if told:
            os._exit(128 + number)
        told.append(number)
        end_later(128 + number)
        log.info("stop signal received: this rank exits when rank 0 does, or at a second signal")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    when_launcher_ends(os.environ, lambda: end_later(1))
    try:
        yield
    finally:
        for timer in patience:
            timer.cancel()
