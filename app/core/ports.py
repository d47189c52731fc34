"""The interfaces between packages, as protocols. Implementations are passed to constructors.

Knows: the types of app.core. Must not know: implementations.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from app.core.events import Event
from app.core.images import ImagePixels
from app.core.jobs import (
    CallResult,
    Capacity,
    EngineCall,
    EngineStats,
    Job,
    JobUpdate,
    PrefixSnapshot,
)
from app.core.model_files import GenerationDefaults, ModelDefaults, ModelFiles
from app.core.models import (
    DownloadPreview,
    LibraryStep,
    ModelDetails,
    ModelRecipe,
    ModelState,
    TensorDetails,
)
from app.core.requests import Embeddings, EmbedJob, EmbedRequest, GenerateRequest
from app.core.sampling_params import USUAL_LOGPROBS_LIMIT, LogprobsLimit

RunnerState = Literal["loading", "ready", "stalled", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStatus:
    """The last known status of a runner. Reading it never blocks.

    progress: the load progress from 0 to 100. error: one sentence if the state is "failed" or
    "stalled". A stalled runner is loaded, but its engine has not completed a step for too long.
    capacity: the engine's capacity; None until loaded. rejected: the number of jobs rejected since
    startup because the queue was full. preparing: the number of admitted jobs whose prompt is being
    rendered and tokenized. compiling: the number of submitted jobs whose grammar is being compiled.
    pid: the process ID, if the runner has its own process.
    """

    state: RunnerState
    progress: int
    stats: EngineStats
    error: str | None = None
    capacity: Capacity | None = None
    rejected: int = 0
    preparing: int = 0
    compiling: int = 0
    pid: int | None = None


class Submission(Protocol):
    """A submitted job. Iterating yields its updates, in batches of those that are available at the
    same time; `Ended` is the last one."""

    @property
    def started_ns(self) -> int | None:
        """The monotonic time in ns at which the job left the engine's queue."""
        ...

    @property
    def ended_ns(self) -> int | None:
        """The monotonic time in ns at which the job's slot in the engine became free. It is set
        before the iterator yields `Ended`."""
        ...

    def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]: ...

    def limit_cached_tokens(self, tokens: int) -> None:
        """Caches only the first `tokens` sampled tokens, because the client received no more. Those
        that the engine has already published to other sequences stay."""
        ...

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        """Provides pixels that a `PixelsNeeded` update has requested. Has no effect if the job has
        ended. Raises AppError(TOO_LARGE)."""
        ...


class ReservedSlots(Protocol):
    """Reserved slots in a model's queue, one for each job of a request."""

    def submit(self, job: Job) -> AbstractAsyncContextManager[Submission]:
        """Submits a job like `Runner.submit`, but uses a reserved slot."""
        ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """Computes embeddings like `Runner.embed`, but uses a reserved slot."""
        ...


class Engine(Protocol):
    """The interface for running jobs on one model."""

    def reserve(self, count: int = 1) -> AbstractContextManager[ReservedSlots]:
        """Reserves queue slots for `count` jobs until the context exits. Enter the context before
        any work is done for the jobs. Raises AppError(BUSY) if the queue is full."""
        ...

    def status(self) -> RunnerStatus: ...


FailureCause = Literal["fault", "unknown", "outside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFailure:
    """The reason why a ready runner failed. message: one sentence. cause: the type of the failure.
    "fault" means that the runner had an error, hung or crashed with a signal such as SIGSEGV.
    "outside" means that a user or another program sent the signal. "unknown" means that the system
    may have sent the signal because it was out of memory.

    not_received: the IDs of the jobs that were submitted, but that the runner had not read.
    stuck_since_ns: the monotonic time in ns since which the engine made no progress; None unless
        the runner failed because of that. It has not read jobs submitted later.
    """

    message: str
    cause: FailureCause = "fault"
    not_received: frozenset[str] = frozenset()
    stuck_since_ns: int | None = None


class Runner(Protocol):
    """Keeps one model loaded and runs its jobs."""

    async def start(self, files: ModelFiles) -> None:
        """Loads the model, and returns when it is ready. Raises AppError(MODEL_FILES) if the model
        cannot be loaded."""
        ...

    def submit(self, job: Job) -> AbstractAsyncContextManager[Submission]:
        """Submits a job. Exiting the context early cancels the job within one prefill chunk or two
        steps. Raises AppError(LOADING) or AppError(ENGINE) if no engine is available, and
        AppError(INVALID) for an unsupported grammar."""
        ...

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        """Returns the embeddings of the job's inputs. Cancelling the call cancels the job. Raises
        the same errors as `submit`, and AppError(ENGINE) if the engine fails before the job is
        done. Must not be called if the capacity's hidden_size is None."""
        ...

    def status(self) -> RunnerStatus: ...

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        """Calls the engine, once it has finished its current step, and returns its reply. If the
        call is cancelled, the engine may still handle it. Raises AppError as `submit` does, and the
        AppError of the call."""
        ...

    async def wait_for_failure(self) -> RunnerFailure:
        """Returns when a ready runner fails, but not when it is stopped. Any number of tasks may
        wait."""
        ...

    async def stop(self) -> None:
        """Stops the runner immediately; running jobs end with errors. May be called more than
        once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The public description of a model. created: the creation time as Unix time. aliases: further
    names that requests may use. defaults: the model's own options; empty if its files cannot be
    read. own_name: its name without an alias: a Hugging Face ID, an Ollama name, or the last part
    of a folder's path. folder: the model's folder, if it was specified by one; only administrators
    may see it. system_fingerprint: a value that changes whenever the output for a given
    seed may change. It depends on the model's files, the package versions and the settings.
    logprobs_limit: the number of alternatives that requests may ask for. parent: the name of the
    model without its adapter; None without an adapter. vision: whether messages may have images."""

    id: str
    created: int
    context_length: int
    system_fingerprint: str = "fp_mlxrunner"
    aliases: tuple[str, ...] = ()
    own_name: str | None = None
    folder: Path | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    logprobs_limit: LogprobsLimit = USUAL_LOGPROBS_LIMIT
    parent: str | None = None
    vision: bool = False


class ResolvedModel(Protocol):
    """The model of a request, resolved once. The model's files and state may change afterwards."""

    @property
    def card(self) -> ModelCard: ...


class Models(Protocol):
    """The models that requests may use."""

    async def resolve(self, name: str | None) -> ResolvedModel:
        """Returns the model with that name, even if it was installed only a moment ago. Ollama's
        clients may append ":latest". If `name` is None, returns the server's default model. Raises
        AppError(MODEL_NOT_FOUND), or AppError(LOADING) if no model is known yet."""
        ...

    async def rescan(self) -> None:
        """Finds models that were installed after the last scan."""
        ...

    def list_models(self) -> Sequence[ModelCard]:
        """Returns all models, the server's default model first, each followed by its
        adapters."""
        ...

    def list_model_states(self) -> Sequence[ModelState]:
        """Returns the states of all models, without their adapters, in the order of
        `list_models`."""
        ...

    def model_state(self, model: ResolvedModel) -> ModelState: ...

    def get_prefix_snapshot(self, name: str) -> PrefixSnapshot | None:
        """Returns the last known snapshot of a model's prefix cache, and requests a new one for
        later calls. Never waits. Returns None if there is none yet, or the model is not loaded."""
        ...

    def status(self) -> RunnerStatus:
        """Returns the status of the whole server: the combined state of the models that are always
        loaded, and sums over all models."""
        ...

    @property
    def library(self) -> "ModelLibrary": ...

    async def describe(self, model: ResolvedModel) -> ModelDetails:
        """Returns the details of a model, even if it is not loaded. Raises AppError if its files
        cannot be read."""
        ...

    async def list_details(self) -> Sequence[ModelDetails]:
        """Returns the details of all models whose files can be read."""
        ...

    async def list_tensors(self, model: ResolvedModel) -> Sequence[TensorDetails]:
        """Lists the tensors of a model, even if it is not loaded. Raises AppError."""
        ...

    async def load(
        self, model: ResolvedModel, keep_alive: float | None = None, *, admin: bool = True
    ) -> ModelState:
        """Loads a model, and returns when it is ready. keep_alive: the number of seconds that the
        model stays loaded without requests; None does not change the current value. admin: whether
        the caller may manage models. Raises AppError on failure."""
        ...

    async def unload(self, model: ResolvedModel) -> ModelState:
        """Unloads a model after its requests have finished, and returns when its memory has been
        freed. Raises AppError for a pinned model."""
        ...

    async def load_adapter(
        self, model: ResolvedModel, name: str, path: str, *, in_place: bool = False
    ) -> None:
        """Loads a LoRA adapter of a model from a path on this machine. This also loads the model.
        in_place: whether the adapter replaces one with the same name, which running requests
        continue to use. Raises AppError, and then nothing has changed: INVALID if the name is taken
        or the adapter cannot be used, MODEL_NOT_FOUND if the path does not exist."""
        ...

    async def unload_adapter(self, model: ResolvedModel, name: str) -> None:
        """Unloads a LoRA adapter of a model after the requests that use it have finished. New
        requests no longer find it. Raises AppError(MODEL_NOT_FOUND)."""
        ...

    def get_defaults(self, model: ResolvedModel) -> ModelDefaults:
        """Returns the defaults of a model that an administrator has set."""
        ...

    async def set_defaults(self, model: ResolvedModel, defaults: ModelDefaults) -> bool:
        """Replaces the defaults of a model. They apply to all later requests; a model whose context
        changes is loaded again after its running requests. Returns whether the configuration file
        contains them, so that they also apply after a restart. Raises AppError if an alias is
        taken, or if the file cannot be written; the defaults are then unchanged."""
        ...

    async def tokenize(
        self, model: ResolvedModel, text: str, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        """Returns the token IDs of a text. add_special_tokens: whether to add the special tokens of
        a prompt. The model does not have to be loaded."""
        ...

    async def tokenize_chat(self, model: ResolvedModel, request: GenerateRequest) -> Sequence[int]:
        """Returns the prompt tokens of a conversation, even if they exceed the context. The model
        does not have to be loaded. Raises the same errors as `Generate.open`."""
        ...

    async def render_chat(self, model: ResolvedModel, request: GenerateRequest) -> str:
        """Returns the text of the prompt of a conversation. Like `tokenize_chat` otherwise."""
        ...

    async def get_token_bytes(self, model: ResolvedModel, ids: Sequence[int]) -> Sequence[bytes]:
        """Returns the bytes of each token. An ID that is not a token results in b""."""
        ...

    async def get_tokenizer_info(self, model: ResolvedModel) -> Mapping[str, Any]:
        """Returns the result of `app.text.chat_template.build_tokenizer_info`."""
        ...

    async def detokenize(self, model: ResolvedModel, ids: Sequence[int]) -> str:
        """Returns the text of tokens. Raises AppError(INVALID) for a token ID outside the
        vocabulary."""
        ...


class BlobWriter(Protocol):
    """A file that is being uploaded."""

    async def write(self, data: bytes) -> None:
        """Appends data. Raises AppError(TOO_LARGE) if too little disk space would remain free."""
        ...

    async def commit(self) -> None:
        """Stores the file. Raises AppError(INVALID) if the content does not match the digest."""
        ...


class ModelLibrary(Protocol):
    """Installs, creates and deletes models on disk. Names are validated, so that no path can point
    outside the store. All work runs on threads."""

    async def preview(self, name: str) -> DownloadPreview:
        """Returns the requirements of downloading a model. Reads only its config and the headers of
        its weights. Raises AppError, for example if the model could not be served."""
        ...

    def pull(self, name: str) -> AsyncGenerator[LibraryStep]:
        """Downloads a model. Closing the generator stops the download. Raises AppError, for example
        while another download is running."""
        ...

    def create(self, recipe: ModelRecipe) -> AsyncGenerator[LibraryStep]:
        """Creates a model. Raises AppError."""
        ...

    async def copy(self, source: str, destination: str) -> None:
        """Adds a second name for a model. Raises AppError."""
        ...

    async def delete(self, name: str) -> None:
        """Deletes a model that is not loaded. Raises AppError."""
        ...

    async def has_blob(self, digest: str) -> bool:
        """Returns whether the file is stored. Raises AppError(INVALID) for an invalid digest."""
        ...

    def upload_blob(self, digest: str) -> AbstractAsyncContextManager[BlobWriter]:
        """Uploads a file. Exiting the context without `commit` discards the file. Raises AppError,
        including while another upload is running."""
        ...


class Generate(Protocol):
    """The interface for generation and embedding. Limits, metrics and tracing wrap an
    implementation."""

    def open(
        self, request: GenerateRequest, model: ResolvedModel
    ) -> AbstractAsyncContextManager[AsyncIterator[Sequence[Event]]]:
        """Validates, tokenizes and queues the request on entry, or raises AppError. Exiting the
        context early cancels the request. Iterating yields events, in batches of those that are
        available at the same time; `Finish` is the last one. Iterating raises AppError(ENGINE) if
        the engine fails."""
        ...

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Embeddings:
        """Computes embeddings. Raises AppError, for example if the model does not support
        embeddings. Cancelling the call cancels the request."""
        ...
