"""A follower rank: loads its part of the model and repeats every engine step of rank 0.

Knows: the engine loop, the connection to rank 0, signals. Must not know: HTTP, text.

The main thread reads the connection and handles signals. The engine runs on its own thread, as on
rank 0. Rank 0 decides when all ranks exit. A stop signal is usually sent to all ranks at the same
time, while requests may still be running. A follower that receives one therefore waits for rank 0
to exit.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import NoReturn

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.engine.distributed import DistributedGroup
from app.engine.loader import load
from app.engine.loop import Loop
from app.engine.thread import MAINTENANCE_INTERVAL, format_exception, release_device_memory
from app.engine.wired_memory import unwire_memory
from app.grammar.compiler import GrammarCompiler, Matcher
from app.runners.ranks.launch import Launch, watch_launcher
from app.runners.ranks.protocol import (
    Command,
    Compile,
    Compiled,
    Hello,
    HelloReply,
    RankConnection,
    RankFailed,
    RunStep,
    StepChecksum,
    Stop,
)
from app.runners.ranks.rendezvous import (
    RENDEZVOUS_BYTES,
    RendezvousInfo,
    collect_traits,
    join_rank_group,
)
from app.runners.worker_protocol import Cancel, Embed, ProvideImages, Submit

log = logging.getLogger(__name__)

# The timeout in seconds for connecting to rank 0 once the address is known.
_CONNECT_TIMEOUT = 30.0

# The time in seconds, in addition to `Settings.drain`, within which rank 0 must exit after a stop
# signal.
_EXIT_GRACE = 15.0

# The timeout in seconds for the current step to finish.
_STEP_TIMEOUT = 30.0

_DIVERGED = (
    "its results differ from those of rank 0 for the same requests, so the ranks cannot run the "
    "model together; this is a bug in mlxrunner or a hardware fault"
)
_STEP_FAILED = "a step failed on this rank; its log contains the error"


def run_follower(launch: Launch, files: ModelFiles, settings: Settings) -> int:
    """Runs until rank 0 stops, and returns the exit status. Raises AppError if rank 0 rejects this
    rank. If rank 0 is lost, the process exits immediately, because the engine may be blocked in a
    collective operation."""
    ranks = join_rank_group(launch)
    connection = _connect(launch, ranks, files, settings)
    follower = _Follower(connection, ranks, files, settings)
    with _exit_with_leader(settings):
        ended_well = follower.run()
    connection.close()
    if not ended_well:
        logging.shutdown()
        _exit_unwired(1)
    return 0


def _exit_unwired(status: int) -> NoReturn:
    """Exits at once. The engine thread may be blocked, so it cannot free its memory."""
    unwire_memory()
    os._exit(status)


def _connect(
    launch: Launch, ranks: DistributedGroup, files: ModelFiles, settings: Settings
) -> RankConnection:
    meeting = RendezvousInfo.decode(ranks.broadcast_bytes(b"", RENDEZVOUS_BYTES))
    own = socket.gethostname()
    host = launch.host or ("127.0.0.1" if meeting.host == own else meeting.host)
    try:
        connection = RankConnection(
            socket.create_connection((host, meeting.port), timeout=_CONNECT_TIMEOUT)
        )
    except OSError as error:
        raise AppError(
            ErrorKind.ENGINE, f"cannot connect to rank 0 at {host}, port {meeting.port}: {error}"
        ) from error
    connection.set_timeout(_CONNECT_TIMEOUT)
    traits = collect_traits(files, settings)
    connection.send(Hello(secret=meeting.secret, rank=launch.rank, host=own, traits=traits))
    match next(connection.read_from_leader(), None):
        case HelloReply(refused=None):
            connection.set_timeout(None)
            return connection
        case HelloReply(refused=why):
            connection.close()
            raise AppError(ErrorKind.INVALID, f"rank 0 refused this rank: {why}")
        case _:
            connection.close()
            raise AppError(ErrorKind.ENGINE, "rank 0 disconnected")


class _Follower:
    def __init__(
        self,
        connection: RankConnection,
        ranks: DistributedGroup,
        files: ModelFiles,
        settings: Settings,
    ) -> None:
        self._connection = connection
        self._ranks = ranks
        self._files = files
        self._settings = settings
        self._grammars = GrammarCompiler.for_model(files)
        self._grammars.preload_tokenizer()
        self._failed = False  # written by the engine thread
        self._steps: queue.SimpleQueue[RunStep | None] = queue.SimpleQueue()
        self._engine_thread = threading.Thread(
            target=self._run_engine, name="mlx-engine", daemon=True
        )

    def run(self) -> bool:
        """Runs until the connection ends. Returns whether rank 0 has stopped this rank."""
        self._engine_thread.start()
        for message in self._connection.read_from_leader():
            match message:
                case RunStep():
                    self._steps.put(message)
                case Compile():
                    threading.Thread(target=self._compile, args=(message,), daemon=True).start()
                case Stop():
                    log.info("rank %d: stopped by rank 0", self._ranks.rank)
                    self._steps.put(None)
                    self._engine_thread.join(_STEP_TIMEOUT)
                    return not self._engine_thread.is_alive()
                case HelloReply():
                    pass
        if not self._failed:
            log.error("rank %d: rank 0 disconnected; exiting", self._ranks.rank)
        return False

    def _run_engine(self) -> None:
        """Runs the engine on the engine thread. An error is reported to rank 0 and closes the
        connection."""
        try:
            self._run_steps()
        except AppError as error:
            self._fail(error.message)
        except Exception as error:
            log.exception("rank %d: the engine failed", self._ranks.rank)
            self._fail(format_exception(error))
        finally:
            release_device_memory()

    def _run_steps(self) -> None:
        loop = load(self._files, self._settings, lambda done, memory: None, self._ranks)
        log.info(
            "rank %d of %d is ready (process %d)", self._ranks.rank, self._ranks.size, os.getpid()
        )
        checksum = StepChecksum()
        while (turn := self._wait_for_step(loop)) is not None:
            if turn.checksum != checksum.value:
                raise AppError(ErrorKind.ENGINE, _DIVERGED)
            for command in turn.commands:
                self._execute(command, loop)
            step = loop.step()
            if loop.exceptions:
                raise AppError(ErrorKind.ENGINE, _STEP_FAILED)
            checksum.update(step)

    def _wait_for_step(self, loop: Loop) -> RunStep | None:
        """Waits for the next step, and maintains the memory of the idle loop in the meantime.
        Returns None when rank 0 stops this rank."""
        since = time.monotonic()
        while True:
            try:
                return self._steps.get(timeout=MAINTENANCE_INTERVAL)
            except queue.Empty:
                loop.maintain_memory(time.monotonic() - since)

    def _execute(self, command: Command, loop: Loop) -> None:
        match command:
            case Submit(job=job):
                loop.submit(job, self._compile_matcher(command))
            case Embed(job=job):
                loop.embed(job)
            case ProvideImages():
                loop.provide_images(command.job, command.images)
            case Cancel(job=job, keep=keep):
                loop.cancel(job, keep=keep)

    def _compile_matcher(self, command: Submit) -> Matcher | None:
        """Returns the matcher of the job's grammar. Usually, the grammar was already compiled by a
        `Compile` message."""
        job = command.job
        return job.grammar and self._grammars.compile(job.grammar, job.stop_token_ids)

    def _compile(self, message: Compile) -> None:
        """Compiles a grammar in advance, so that it is cached. Rank 0 reports the errors."""
        try:
            self._grammars.compile(message.grammar, message.stop_ids)
        except AppError as error:
            log.info("rank %d: %s", self._ranks.rank, error.message)
        self._connection.send(Compiled(number=message.number))

    def _fail(self, reason: str) -> None:
        self._failed = True
        log.error("rank %d: %s", self._ranks.rank, reason)
        self._connection.send(RankFailed(reason=reason))
        self._connection.shutdown()


@contextlib.contextmanager
def _exit_with_leader(settings: Settings) -> Generator[None]:
    """After a stop signal, or when the launcher has exited, waits for rank 0 to exit. A second
    signal causes an immediate exit. The exit of the launcher does not count as a signal, because a
    signal sent to all processes may stop the launcher before it reaches this process."""
    patience: list[threading.Timer] = []
    received: list[int] = []

    def end_later(status: int) -> None:
        timer = threading.Timer(settings.drain + _EXIT_GRACE, _exit_unwired, (status,))
        timer.daemon = True
        patience.append(timer)
        timer.start()

    def handle(number: int, _: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        end_later(128 + number)
        log.info("stop signal received: this rank exits when rank 0 exits, or on a second signal")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    watch_launcher(os.environ, lambda: end_later(1))
    try:
        yield
    finally:
        for timer in patience:
            timer.cancel()
