"""Installed and served models: their public details, their state and their memory requirements, and
the data types for creating and downloading models.

Knows: names, sizes, texts, seconds. Must not know: where models are stored, model loading, HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.core.jobs import ComputeBackend, EngineStats
from app.core.sampling_params import SamplingValue
from app.core.settings import Settings
from app.core.units import format_bytes, format_memory

# insert: fill-in-the-middle. vision: images in messages. embedding: an embedding model rather than
# a chat model. rerank: scores documents for a query
Capability = Literal["completion", "tools", "insert", "thinking", "vision", "embedding", "rerank"]

# Whether a model reasons before the final output: never, unless disabled by the request, or always.
ReasoningSupport = Literal["none", "optional", "always"]

# unloaded: on disk only · queued: waiting until another model is loaded or unloaded · unloading:
# its process is being stopped · refused: the model failed too often, see `error`
ModelPhase = Literal[
    "unloaded", "queued", "loading", "ready", "stalled", "failed", "unloading", "refused"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDetails:
    """One tensor of a model. dtype: the data type, as spelled in safetensors files."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDetails:
    """Facts about an installed model.

    architecture: the model_type. parameters: the number of parameters. quantization: the format of
    most weights, such as "int4" or "BF16". size: the size of the weights in bytes. digest: 64
    hexadecimal digits that change when the files change. modified: the modification time as Unix
    time. context_length: the maximum number of tokens in a request. keep_alive: the number of
    seconds for which the operator keeps the model loaded without requests; math.inf means forever.
    format: the format of the weights. chat: whether the model has a chat template. template: the
    text of the chat template. defaults: the recommended sampling parameters; see `SamplingParams`.
    max_tokens, stop: the values in generation_config.json. config: the parsed config.json. license,
    system, messages, parent: as in `ModelFiles`."""

    name: str
    architecture: str
    parameters: int
    quantization: str
    size: int
    digest: str
    modified: float
    context_length: int
    keep_alive: float
    capabilities: frozenset[Capability]
    format: Literal["gguf", "safetensors"] = "safetensors"
    reasoning: ReasoningSupport = "none"
    chat: bool = True
    template: str = ""
    system: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    license: str = ""
    parent: str = ""
    defaults: Mapping[str, SamplingValue] = field(default_factory=dict[str, SamplingValue])
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPreview:
    """The requirements of a download, before any weight is downloaded. All sizes are in bytes.

    name: the repository on the hub. size: the size of all files. missing: the size of the files
    that are not downloaded yet. context_length: the model's context length. memory_needed: the
    memory to serve the model with its settings. memory_available: the memory for all models of this
    server together. disk_available: the free space, less the space that a download leaves free.
    """

    name: str
    commit: str
    size: int
    missing: int
    context_length: int
    memory_needed: int
    memory_available: int
    disk_available: int

    @property
    def problem(self) -> str | None:
        """The reason why the model could not be downloaded or loaded, or None."""
        if self.missing > self.disk_available:
            return (
                f"the download needs {format_bytes(self.missing)} on the disk, but only "
                f"{format_bytes(max(self.disk_available, 0))} is available"
            )
        if self.memory_needed > self.memory_available:
            return (
                f"the model needs {format_memory(self.memory_needed)} of memory, but only "
                f"{format_memory(self.memory_available)} is available"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProgress:
    """The download progress of one file. digest: the digest of the content, with its algorithm.
    total, completed: sizes in bytes."""

    digest: str
    total: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryStep:
    """A progress report while a model is downloaded or created. status: a sentence; "" if only the
    progress of one file is reported."""

    status: str = ""
    layer: LayerProgress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """A description of a model to create from another model or from uploaded files.

    base: the name of the installed base model; None if `files` is not empty. files: maps file names
    to digests. system, template, license: None keeps the value of the base model. parameters:
    parameters with Ollama's names, which override the parameters of the base model. messages: pairs
    of role and content; None keeps the messages of the base model."""

    name: str
    base: str | None
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    system: str | None = None
    license: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that clients may request.

    name: the name used by clients. aliases: additional names that requests may use. source: the
    argument of `store.find`; None means the built-in model. folder: the folder that `source` names,
    without links; None if it names none. settings: the model's settings, from
    `Settings.for_model`. keep_alive: the number of seconds that the model stays loaded without
    requests; math.inf means forever. pinned: whether the model is never evicted.
    """

    name: str
    source: str | None
    settings: Settings
    keep_alive: float
    pinned: bool = False
    aliases: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequirement:
    """The memory that a model needs, including KV caches, estimated before it is loaded.

    min_bytes: the minimum for serving the model with its settings. preferred_bytes: the recommended
    size; more memory only enlarges the prefix cache. device_budget: the number of bytes currently
    available on the device for all models of this server.
    """

    min_bytes: int
    preferred_bytes: int
    device_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The current state of one model.

    progress: the load progress from 0 to 100. stats: counters since the server started, summed over
    all runners of the model, and gauges of the current runner. leases: the number of requests that
    hold the model or wait for it. preparing, compiling: the number of admitted jobs whose prompt is
    being prepared, or whose grammar is being compiled. rejected: the number of jobs that were
    rejected because the queue was full. allocation: the number of bytes that the model may use;
    None while it is not loaded, or if it may use the whole device. expires_at: the Unix time at
    which the model will be unloaded if no further request arrives; None while it has requests, is
    not loaded, or stays loaded forever. loads: the number of completed loads. evictions: the number
    of times that the model was unloaded before its keep-alive expired, to free memory for another
    model. restarts: the number of times that its runner was restarted. backend: the compute
    backend, and kv_dtype: the type of the keys and values in its KV caches; both are set while the
    model is loaded.
    """

    name: str
    phase: ModelPhase
    progress: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    context_length: int | None = None
    parallel: int | None = None
    leases: int = 0
    preparing: int = 0
    compiling: int = 0
    rejected: int = 0
    pinned: bool = False
    allocation: int | None = None
    expires_at: float | None = None
    loads: int = 0
    evictions: int = 0
    restarts: int = 0
    error: str | None = None
    pid: int | None = None
    backend: ComputeBackend | None = None
    kv_dtype: str | None = None
