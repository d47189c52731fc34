"""Preflight: estimates the memory requirement of the next model to load, in a short-lived process.

Knows: the model files, the preflight process and its messages. Must not know: the eviction policy.

The estimate runs once for each model at the head of the queue. No other model is loaded or unloaded
at the same time, so memory that is free during the estimate is available for the model. The result
is valid until the load starts or another model reaches the head of the queue.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.models import MemoryRequirement, ServedModel
from app.core.settings import Settings
from app.runners.channel import make_decoder
from app.runners.child_process import describe_exit, run_module
from app.runners.handle import ModelHandle
from app.runners.restart_policy import RUNNER_CRASHED

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """The message on the stdin of the process. Stdin stays open while the parent waits for the
    response.

    parent_pid: the process ID of the parent.
    loaded_bytes: the number of bytes used by the models that are already loaded.
    """

    parent_pid: int
    files: ModelFiles
    settings: Settings
    loaded_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateError:
    """The `kind` and `message` of the AppError raised by the estimate."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateResponse:
    """The output of the process. Either field is None."""

    requirement: MemoryRequirement | None = None
    error: EstimateError | None = None


async def estimate_memory(
    files: ModelFiles, settings: Settings, loaded_bytes: int
) -> MemoryRequirement:
    """Estimates the memory requirement of a model in a separate process. `loaded_bytes` is the
    number of bytes used by the models that are already loaded.

    Raises AppError(MODEL_FILES) for unusable files, or if the process takes longer than
    `settings.load_timeout`; with the code RUNNER_CRASHED if the process exits without a result, as
    a crashed load does. Raises AppError(ENGINE) if the process cannot be started.
    """
    question = EstimateRequest(
        parent_pid=os.getpid(), files=files, settings=settings, loaded_bytes=loaded_bytes
    )
    try:
        reply = await run_module("app.runners.preflight_main", question, settings.load_timeout)
    except TimeoutError:
        why = f"the process took longer than {settings.load_timeout:g} s"
        raise _build_error(ErrorKind.MODEL_FILES, files, why) from None
    except OSError as error:
        raise _build_error(
            ErrorKind.ENGINE, files, f"the process could not be started: {error}"
        ) from error
    if reply.status != 0 or not reply.stdout:
        why = f"the process {describe_exit(reply.status)}{reply.reason and f': {reply.reason}'}"
        raise _build_error(ErrorKind.MODEL_FILES, files, why, code=RUNNER_CRASHED)
    response: EstimateResponse = make_decoder(EstimateResponse).decode(reply.stdout)
    if response.error is not None:
        raise AppError(response.error.kind, response.error.message)
    assert response.requirement is not None
    return response.requirement


def _build_error(
    kind: ErrorKind, files: ModelFiles, reason: str, code: str | None = None
) -> AppError:
    message = f"{files.path}: the memory that the model needs could not be estimated: {reason}"
    return AppError(kind, message, code=code)


ReadFiles = Callable[[ServedModel], Awaitable[ModelFiles]]
# The arguments are the files, the settings, and the bytes used by the models that are already
# loaded.
EstimateMemory = Callable[[ModelFiles, Settings, int], Awaitable[MemoryRequirement]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """The result of a preflight. `requirement` is the memory requirement of the model, and
    `total_bytes` is the memory budget for all models. Both are None if the model may use all
    memory."""

    files: ModelFiles
    requirement: MemoryRequirement | None
    total_bytes: int | None


class Preflight:
    """Reads the files and estimates the memory requirement of one model at a time.

    estimate_memory: estimates the requirement; None if the model may use all memory.
    total_bytes: the memory budget for all models; None for the device's memory.
    on_result: called when an estimate has finished.
    """

    def __init__(
        self,
        read_files: ReadFiles,
        estimate_memory: EstimateMemory | None,
        total_bytes: int | None,
        on_result: Callable[[], None],
    ) -> None:
        self._read_files = read_files
        self.estimate_memory = estimate_memory
        self._total_bytes = total_bytes
        self._on_result = on_result
        self._model: str | None = None
        self._result: PreflightResult | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def total_bytes(self) -> int | None:
        """The memory budget for all models according to the last result; None if there is no
        result."""
        return None if self._result is None else self._result.total_bytes

    def get_result(self, name: str) -> PreflightResult | None:
        return self._result if self._model == name else None

    def select(self, handle: ModelHandle | None, loaded: Sequence[ModelHandle]) -> None:
        """Sets the model at the head of the queue, and starts its estimate if possible. `loaded`
        lists the models in memory."""
        name = None if handle is None else handle.served.name
        if name != self._model:
            self._reset()
        busy = self._task is not None or self._result is not None
        in_transition = any(one.phase != "ready" for one in loaded)
        if handle is not None and not busy and not in_transition:
            self._model = name
            self._task = asyncio.create_task(self._run(handle, loaded))

    def take_files(self, name: str) -> ModelFiles:
        """Returns the files of the model and resets the preflight, because the model is about to be
        loaded."""
        assert self._model == name
        assert self._result is not None
        files = self._result.files
        self._reset()
        return files

    async def stop(self) -> None:
        task = self._task
        self._reset()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _estimate(
        self, handle: ModelHandle, files: ModelFiles, loaded_bytes: int
    ) -> MemoryRequirement | None:
        """Returns the memory requirement of the model. With a fixed budget, the last estimate for
        the same files is reused, because an estimate takes about as long as loading a small model.
        Otherwise, the free memory of the device must be read each time."""
        if self.estimate_memory is None:
            return None
        if (
            self._total_bytes is not None
            and handle.requirement is not None
            and handle.files == files
        ):
            return handle.requirement
        return await self.estimate_memory(files, handle.served.settings, loaded_bytes)

    def _reset(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._model = self._result = self._task = None

    async def _run(self, handle: ModelHandle, loaded: Sequence[ModelHandle]) -> None:
        served = handle.served
        try:
            files = await self._read_files(served)
            need = await self._estimate(handle, files, sum(one.allocated_bytes for one in loaded))
        except Exception as error:
            self._task = None
            self._reset()
            handle.fail_load(_as_load_error(error, served))
        else:
            self._task = None
            handle.requirement = need
            total = None if need is None else self._total_bytes
            is_fixed = need is None or total is not None
            if need is not None and total is None:
                total = need.device_budget
            if is_fixed or all(one.phase == "ready" for one in loaded):
                self._result = PreflightResult(files=files, requirement=need, total_bytes=total)
            else:  # a model was unloaded during the estimate, so the free memory is uncertain
                self._reset()
        self._on_result()


def _as_load_error(error: Exception, served: ServedModel) -> AppError:
    if isinstance(error, AppError):
        log.error("%s cannot be loaded: %s", served.name, error.message)
        return error
    log.error("the files of %s could not be read", served.name, exc_info=error)
    return AppError(ErrorKind.MODEL_FILES, f"{served.name} could not be read: {error}")
