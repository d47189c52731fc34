"""An engine that answers jobs for a proof, and blocks until they have ended.

Knows: the engine thread, grammars, the order of jobs. Must not know: conversations, comparisons.
"""

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from app.core.errors import AppError, ErrorKind
from app.core.jobs import (
    Capacity,
    Ended,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineStats,
    Job,
    JobUpdate,
    Started,
    StepOutput,
    Token,
)
from app.core.model_files import ModelFiles
from app.core.settings import Settings
from app.engine.loader import load
from app.engine.loop import Loop
from app.engine.thread import EngineThread
from app.grammar.compiler import GrammarCompiler
from app.prove.comparison import Answer

# seconds without a message after which an engine counts as hung
_TIMEOUT = 600.0

_STOP_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofJob:
    """A job. cancel_after: the number of tokens after which it is cancelled; None for never."""

    job: Job
    cancel_after: int | None = None


@dataclass(slots=True)
class _Progress:
    cached: int = 0
    tokens: list[Token] = field(default_factory=list[Token])


class ProofEngine:
    """Loads a model, and answers jobs. Use it as a context manager, which unloads the model.

    Raises AppError if the model cannot be loaded, and for an engine that failed or hangs.
    """

    def __init__(
        self,
        files: ModelFiles,
        settings: Settings,
        grammars: GrammarCompiler | None = None,
        kv_bytes: int | None = None,
    ) -> None:
        self._messages: queue.SimpleQueue[EngineMessage] = queue.SimpleQueue()
        self._grammars = grammars or GrammarCompiler.for_model(files)
        self.batch_invariant = False
        self.max_running = 0

        def read(report: object) -> Loop:
            loop = load(files, settings, lambda _done, _bytes: None, kv_bytes=kv_bytes)
            self.batch_invariant = loop.batch_invariant
            return loop

        self._thread = EngineThread(read, self._messages.put)
        self._thread.start()
        try:
            ready = self._receive()
        except AppError:
            self._thread.join(_STOP_TIMEOUT)
            raise
        assert isinstance(ready, EngineReady)
        self.capacity: Capacity = ready.capacity
        self.stats: EngineStats = ready.stats

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()
        self._thread.join(_STOP_TIMEOUT)

    def run(
        self, chains: Sequence[Sequence[ProofJob]], *, concurrent: bool
    ) -> Mapping[str, Answer]:
        """Runs the jobs of each chain one after another. Returns the answers by job ID.
        concurrent: whether all chains run at the same time, instead of one after another."""
        answers: dict[str, Answer] = {}
        for group in [chains] if concurrent else [[chain] for chain in chains]:
            answers |= self._run_group(group)
        return answers

    def _run_group(self, chains: Sequence[Sequence[ProofJob]]) -> Mapping[str, Answer]:
        rest = {chain[0].job.id: list(chain) for chain in chains if chain}
        running: dict[str, _Progress] = {}
        answers: dict[str, Answer] = {}
        for chain in rest.values():
            self._submit(chain[0], running)
        while running:
            output = self._receive()
            assert isinstance(output, StepOutput)
            self.stats = output.stats
            self.max_running = max(self.max_running, output.stats.running)
            for update in output.updates:
                chain = rest[update.job_id]
                answer = self._apply(update, chain[0], running[update.job_id])
                if answer is None:
                    continue
                answers[update.job_id] = answer
                del running[update.job_id], rest[update.job_id]
                if len(chain) > 1:
                    rest[chain[1].job.id] = chain[1:]
                    self._submit(chain[1], running)
        return answers

    def _submit(self, one: ProofJob, running: dict[str, _Progress]) -> None:
        matcher = None
        if one.job.grammar is not None:
            matcher = self._grammars.compile(one.job.grammar, one.job.stop_token_ids)
        running[one.job.id] = _Progress()
        self._thread.submit(one.job, matcher)

    def _apply(self, update: JobUpdate, one: ProofJob, progress: _Progress) -> Answer | None:
        """Applies an update. Returns the answer if it has ended."""
        match update:
            case Started():
                progress.cached = update.cached_tokens
            case Token():
                progress.tokens.append(update)
                if len(progress.tokens) == one.cancel_after:
                    self._thread.cancel(one.job.id)
            case Ended():
                return Answer(
                    tokens=tuple(progress.tokens),
                    reason=update.reason,
                    error=update.error,
                    cached_tokens=progress.cached,
                )
            case _:
                pass
        return None

    def _receive(self) -> EngineMessage:
        """Returns the next message about the model or its jobs."""
        while True:
            try:
                message = self._messages.get(timeout=_TIMEOUT)
            except queue.Empty:
                why = f"the engine has made no progress for {_TIMEOUT:.0f} s"
                raise AppError(ErrorKind.ENGINE, why) from None
            if isinstance(message, EngineFailed):
                raise AppError(message.kind, message.message)
            if isinstance(message, (EngineReady, StepOutput)):
                return message
