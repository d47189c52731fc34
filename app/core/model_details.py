"""The public details of a model, and the values that managing models takes and returns.

Knows: names, sizes, texts. Must not know: where models are stored, HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.core.sampling_params import SamplingValue

# insert: fill-in-the-middle. embedding: made for embeddings, not for chats
Capability = Literal["completion", "tools", "insert", "thinking", "embedding"]

# Whether a model reasons before it answers: it never does, a request may turn it off, or it always
# does.
ReasoningSupport = Literal["none", "optional", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDetails:
    """One tensor of a model. dtype: as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDetails:
    """Facts about an installed model.

    architecture: its model_type. parameters: number of parameters. quantization: the format of most
    of its weights, such as "int4" or "BF16". size: bytes of the weights. digest: 64 hexadecimal
    digits that change with its files. modified: Unix time. context_length: tokens that a request
    may have. keep_alive: seconds that the operator keeps it loaded without requests; math.inf is
    forever. chat: whether it has a chat template. template: its text. defaults: recommended
    sampling parameters; see `SamplingParams`. max_tokens, stop: as in generation_config.json.
    config: its config.json. license, system, messages, parent: as in `ModelFiles`."""

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
class LayerProgress:
    """The download of one file. digest: of its content, with its algorithm. total, completed:
    bytes."""

    digest: str
    total: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryStep:
    """A step of a download or of a creation. status: a sentence; "" for a step of one file."""

    status: str = ""
    layer: LayerProgress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """A model to create from another one, or from uploaded files.

    base: name of the installed model that it is made of; None if `files` is not empty. files:
    digest by file name. system, template, license: None keeps those of the base. parameters: in
    Ollama's terms; override those of the base. messages: role and content; None keeps those of the
    base."""

    name: str
    base: str | None
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    system: str | None = None
    license: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: tuple[tuple[str, str], ...] | None = None
