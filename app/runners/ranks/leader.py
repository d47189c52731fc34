"""The rank leader: rank 0's connections to the followers, and its engine loop.

Knows: connections, the threads that read them, the engine loop. Must not know: HTTP, asyncio, the
structure of models.

The followers repeat every step of rank 0's engine. A separate thread reads each connection. A
collective operation with a lost rank never returns, or raises an error that does not identify the
rank. Therefore, if a rank is lost, all ranks fail immediately with an error that identifies the
lost rank, and the process must exit. If the process hangs during the exit, it is killed.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.core.jobs import (
    Capacity,
    EngineCall,
    EngineStats,
    GetPrefixSnapshot,
    Job,
    SetSpareMemory,
    StepOutput,
)
from app.core.model_files import ModelFiles
from app.core.requests import EmbedJob, Grammar
from app.core.settings import Settings
from app.engine.distributed import DistributedGroup
from app.engine.loader import load
from app.engine.loop import Loop
from app.engine.weights import ProgressCallback
from app.engine.wired_memory import unwire_memory
from app.grammar.compiler import GrammarCompiler, Matcher
from app.runners.ranks.launch import Launch
from app.runners.ranks.protocol import (
    Command,
    Compile,
    Compiled,
    Hello,
    HelloReply,
    LeaderMessage,
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

# The timeout in seconds for identifying the lost rank after a failed step.
_FAILURE_TIMEOUT = 2.0

# The timeouts in seconds for all followers to connect, and for each of them to send its hello.
_RENDEZVOUS_TIMEOUT, _HELLO_TIMEOUT = 60.0, 5.0

# The additional timeout in seconds for followers to compile a grammar.
_COMPILE_TIMEOUT = 20.0

# The timeout in seconds for the process to exit after a rank was lost.
_EXIT_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeer:
    """A follower rank and its connection."""

    rank: int
    host: str
    connection: RankConnection

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


class RankGroup:
    """The followers of rank 0. `ranks` is the distributed group used by the engine."""

    def __init__(self, ranks: DistributedGroup, peers: Mapping[int, RankPeer]) -> None:
        self.ranks = ranks
        self._peers = peers
        self._listeners: list[Callable[[str], None]] = []
        self._changed = threading.Condition()
        self._compiled: dict[int, int] = {}  # ranks that have compiled it, by `Compile.number`
        self._last_number = 0
        self._failure: str | None = None
        self._stopped = self._engine_attached = False
        for member in self._peers.values():
            name = f"rank-{member.rank}"
            threading.Thread(
                target=self._read_replies, args=(member,), name=name, daemon=True
            ).start()

    def attach_engine(self, on_failure: Callable[[str], None]) -> None:
        """Attaches rank 0's engine. For `on_failure`, see `add_failure_listener`. Raises
        AppError(ENGINE) for a second engine, because followers load the model only once."""
        if self._engine_attached:
            raise AppError(
                ErrorKind.ENGINE,
                "the model is split across ranks and cannot be loaded again: restart all ranks",
            )
        self._engine_attached = True
        self.add_failure_listener(on_failure)

    def add_failure_listener(self, listener: Callable[[str], None]) -> None:
        """Adds a listener, which is called once, on another thread, with the reason if the group
        fails. If the group has already failed, the listener is called immediately."""
        with self._changed:
            self._listeners.append(listener)
            why = self._failure
        if why is not None:
            listener(why)

    def broadcast(self, message: LeaderMessage) -> None:
        for member in self._peers.values():
            member.connection.send(message)

    def wait_for_failure(self, timeout: float = 0.0) -> str | None:
        """Waits for up to `timeout` seconds for a failure of the group. Returns the reason, or None
        if the group has not failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, timeout)
            return self._failure

    def fail(self, reason: str) -> None:
        """Fails the whole group. Only the first call has an effect. Calls after `stop_followers`
        have no effect."""
        with self._changed:
            if self._failure is not None or self._stopped:
                return
            self._failure = reason
            self._changed.notify_all()
            listeners = list(self._listeners)
        log.error("%s", reason)
        _exit_after(_EXIT_TIMEOUT)
        for listener in listeners:
            listener(reason)

    def stop_followers(self) -> None:
        """Stops all followers. May be called again."""
        with self._changed:
            self._stopped = True
        self.broadcast(Stop())
        for member in self._peers.values():
            member.connection.shutdown()

    def compile_grammar(
        self, grammars: GrammarCompiler, grammar: Grammar, stop_ids: frozenset[int]
    ) -> Matcher:
        """Compiles a grammar like `GrammarCompiler.compile`, but returns only when all followers
        have also compiled it, so that no step waits for the compilation. Must not be called on the
        engine thread. Raises AppError(BUSY) if the followers take too long."""
        with self._changed:
            number = self._last_number = self._last_number + 1
            self._compiled[number] = 0
        self.broadcast(Compile(number=number, grammar=grammar, stop_ids=stop_ids))
        try:
            matcher = grammars.compile(grammar, stop_ids)
            with self._changed:
                complete = self._changed.wait_for(
                    lambda: self._failure or self._compiled[number] == len(self._peers),
                    _COMPILE_TIMEOUT,
                )
        finally:
            with self._changed:
                del self._compiled[number]
        if not complete:
            slow = "the other ranks did not compile the grammar in time: try again in a moment"
            raise AppError(ErrorKind.BUSY, slow, retry_after=round(_COMPILE_TIMEOUT))
        return matcher

    def _read_replies(self, peer: RankPeer) -> None:
        for words in peer.connection.read_from_follower():
            match words:
                case Compiled():
                    self._count_compiled(words.number)
                case RankFailed():
                    self.fail(f"{peer}: {words.reason}")
                case Hello():
                    self.fail(f"{peer} sent a second hello")
        peer.connection.close()
        self.fail(f"{peer} disconnected: its process exited or is unreachable")

    def _count_compiled(self, number: int) -> None:
        with self._changed:
            if number in self._compiled:  # otherwise, `compile_grammar` has returned
                self._compiled[number] += 1
                self._changed.notify_all()


def load_leader(
    files: ModelFiles, settings: Settings, group: RankGroup, report: ProgressCallback
) -> "LeaderLoop":
    """Loads rank 0's shard of the model while the followers load their shards. Raises the same
    errors as `app.engine.loader.load`."""
    return LeaderLoop(load(files, settings, report, group.ranks), group)


class StepGroup(Protocol):
    """The part of `RankGroup` that a step needs."""

    def broadcast(self, message: LeaderMessage) -> None: ...

    def wait_for_failure(self, timeout: float = 0.0) -> str | None: ...

    def fail(self, reason: str) -> None: ...


class LeaderLoop:
    """An engine loop whose steps are repeated by the followers. Before each step, the commands
    since the last step are sent to the followers in the same order."""

    def __init__(self, loop: Loop, group: StepGroup) -> None:
        self._loop = loop
        self._group = group
        self._commands: list[Command] = []
        self._checksum = StepChecksum()

    @property
    def capacity(self) -> Capacity:
        return self._loop.capacity

    @property
    def idle(self) -> bool:
        return self._loop.idle

    @property
    def on_stage(self) -> Callable[[str], None]:
        return self._loop.on_stage

    @on_stage.setter
    def on_stage(self, callback: Callable[[str], None]) -> None:
        self._loop.on_stage = callback

    def submit(self, job: Job, matcher: Matcher | None = None) -> None:
        if job.sampling.seed is None:  # all ranks must use the same seed
            job = replace(job, sampling=replace(job.sampling, seed=secrets.randbits(63)))
        self._commands.append(Submit(job=job))
        self._loop.submit(job, matcher)

    def embed(self, job: EmbedJob) -> None:
        self._commands.append(Embed(job=job))
        self._loop.embed(job)

    def provide_images(self, job: str, images: Sequence[ImagePixels]) -> None:
        self._commands.append(ProvideImages(job=job, images=tuple(images)))
        self._loop.provide_images(job, images)

    def cancel(self, job: str, *, keep: int | None = None) -> None:
        self._commands.append(Cancel(job=job, keep=keep))
        self._loop.cancel(job, keep=keep)

    def step(self) -> StepOutput:
        """Runs one step on all ranks. Raises AppError(ENGINE) if the step fails on any rank,
        because the state of the other ranks is then unknown."""
        if (why := self._group.wait_for_failure()) is not None:
            raise AppError(ErrorKind.ENGINE, why)
        commands, self._commands = tuple(self._commands), []
        self._group.broadcast(RunStep(commands=commands, checksum=self._checksum.value))
        step = self._loop.step()
        if self._loop.exceptions:
            why = (
                self._group.wait_for_failure(timeout=_FAILURE_TIMEOUT) or "a step failed on rank 0"
            )
            self._group.fail(why)
            raise AppError(ErrorKind.ENGINE, why)
        self._checksum.update(step)
        return step

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def maintain_memory(self, idle_seconds: float) -> bool:
        return self._loop.maintain_memory(idle_seconds)

    def call(self, call: EngineCall[Any]) -> Any:
        """Ranks have no spare memory, because all of them must evict the same prefixes."""
        match call:
            case GetPrefixSnapshot():
                return self._loop.call(call)
            case SetSpareMemory():
                return 0
            case _:
                message = "a distributed model supports no adapters"
                raise AppError(ErrorKind.MODEL_FILES, message)

    def check(self) -> None:
        self._loop.check()


def gather_ranks(launch: Launch, files: ModelFiles, settings: Settings) -> RankGroup:
    """Waits for all followers; see `app.engine.distributed.join_group`. Raises AppError if a rank
    is unreachable, or has a different model, version or setting."""
    ranks = join_rank_group(launch)
    with _create_listener(launch) as server:
        meeting = RendezvousInfo(
            secret=secrets.token_hex(16), port=server.getsockname()[1], host=socket.gethostname()
        )
        ranks.broadcast_bytes(meeting.encode(), RENDEZVOUS_BYTES)
        members = _accept_peers(server, meeting, launch, collect_traits(files, settings))
    log.info("rank 0 of %d: connected to %s", launch.size, ", ".join(map(str, members.values())))
    return RankGroup(ranks, members)


def _create_listener(launch: Launch) -> socket.socket:
    host = launch.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def _accept_peers(
    server: socket.socket, rendezvous: RendezvousInfo, launch: Launch, traits: Mapping[str, str]
) -> dict[int, RankPeer]:
    members = dict[int, RankPeer]()
    deadline = time.monotonic() + _RENDEZVOUS_TIMEOUT
    while len(members) < launch.size - 1:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connected, _ = server.accept()
        except TimeoutError:
            missing = set(range(1, launch.size)) - members.keys()
            raise AppError(
                ErrorKind.ENGINE,
                f"rank {min(missing)} joined the group but cannot connect to port "
                f"{rendezvous.port} on {launch.host or rendezvous.host}: make sure that the "
                "firewall allows it",
            ) from None
        line = RankConnection(connected)
        line.set_timeout(_HELLO_TIMEOUT)
        hello = line.read_hello()
        # Only ranks of this group know the secret.
        if hello is None or not secrets.compare_digest(
            hello.secret.encode(), rendezvous.secret.encode()
        ):
            line.close()
            continue
        line.set_timeout(None)
        member = RankPeer(rank=hello.rank, host=hello.host, connection=line)
        refused = _find_mismatch(member, hello.traits, traits)
        line.send(HelloReply(refused=refused))
        if refused is not None:
            line.close()
            raise AppError(ErrorKind.INVALID, refused)
        members[hello.rank] = member
    return members


def _find_mismatch(
    peer: RankPeer, theirs: Mapping[str, str], ours: Mapping[str, str]
) -> str | None:
    for name, value in ours.items():
        if theirs.get(name) != value:
            return (
                f"{peer} has {name} {theirs.get(name)}, but rank 0 has {value}: the values must "
                "be equal on all ranks"
            )
    return None


def _exit_after(seconds: float) -> None:
    """Kills the process after `seconds`. A thread that is blocked in a collective operation cannot
    be stopped, and MLX cannot be shut down until the thread ends."""

    def end() -> None:
        time.sleep(seconds)
        log.error("the process did not exit in time: killing it")
        unwire_memory()
        os._exit(1)

    threading.Thread(target=end, name="forced-exit", daemon=True).start()
