"""Describes models from their files, without loading them.

Knows: the properties that app.store and app.text can read without loading the tokenizer.
Must not know: HTTP, which models are loaded.
"""

import asyncio
import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from app.core.errors import AppError, ErrorKind, redact_paths
from app.core.model_files import GenerationDefaults, ModelFiles, read_generation_defaults
from app.core.models import Capability, ModelDetails, ReasoningSupport, TensorDetails
from app.core.requests import ReasoningOptions
from app.core.thread_pools import ThreadPools
from app.serving.pooling_config import POOLING_MODE, find_rank_method
from app.store.gguf.model import is_gguf_model
from app.store.tensor_summary import list_tensors, summarize_tensors
from app.text.capabilities import detect_capabilities
from app.text.chat_template import ChatTemplate
from app.text.family import find_family
from app.text.generic_tool_calls import GenericFamily
from app.text.infill import has_infill_tokens
from app.text.prompt import NONE_EFFORT, build_thinking_kwargs

# sentence-transformers saves this file with embedding models
_EMBEDDING_FILE = "modules.json"

# describing a model reads headers and renders templates, which is a large work item
_WORK_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """chat: whether the model has a chat template. tools: whether the template renders tools.
    infill: whether the tokenizer has fill-in-the-middle tokens. template: the text of the chat
    template."""

    chat: bool
    tools: bool
    infill: bool
    reasoning: ReasoningSupport
    template: str


class ModelDescriber:
    """Describes models. A description is kept until the files of the model change or the model is
    removed. All code runs on the event loop, except reading files."""

    def __init__(self, workers: ThreadPools) -> None:
        self._workers = workers
        self._known: dict[str, tuple[ModelFiles, asyncio.Task[ModelDetails]]] = {}

    async def describe(self, files: ModelFiles, *, key: str) -> ModelDetails:
        """Describes a model. key: the name of the model. Concurrent calls share one read, which
        continues if a call is cancelled. Raises AppError(MODEL_FILES)."""
        known = self._known.get(key)
        if known is None or known[0] is not files:
            task = asyncio.create_task(self._read(files, key))
            task.add_done_callback(partial(self._forget_failed, key))
            known = self._known[key] = (files, task)
        return await asyncio.shield(known[1])

    async def list_tensors(self, files: ModelFiles) -> Sequence[TensorDetails]:
        return await self._workers.run(partial(list_tensors, files), size=_WORK_SIZE)

    def forget_others(self, keys: Collection[str]) -> None:
        """Drops the descriptions of all models except those with these keys."""
        for key in self._known.keys() - set(keys):
            del self._known[key]

    def _forget_failed(self, key: str, task: asyncio.Task[ModelDetails]) -> None:
        known = self._known.get(key)
        failed = task.cancelled() or task.exception() is not None
        if failed and known is not None and known[1] is task:
            del self._known[key]

    async def _read(self, files: ModelFiles, key: str) -> ModelDetails:
        try:
            return await self._workers.run(partial(_describe, files), size=_WORK_SIZE, key=key)
        except AppError as error:
            raise redact_paths(error, files.path, key) from error
        except OSError as error:
            message = f"{key} cannot be read: {error.strerror}"
            raise AppError(ErrorKind.MODEL_FILES, message) from error


def _describe(files: ModelFiles) -> ModelDetails:
    traits, summary = read_model_traits(files), summarize_tensors(files)
    defaults: GenerationDefaults = read_generation_defaults(files)
    return ModelDetails(
        name=files.name,
        format="gguf" if is_gguf_model(files) else "safetensors",
        architecture=str(files.config.get("model_type") or "unknown"),
        parameters=summary.parameters,
        quantization=summary.quantization,
        size=files.weight_bytes,
        digest=_compute_digest(files),
        modified=files.created,
        context_length=files.resolve_context_length(None),
        keep_alive=math.inf,
        capabilities=_list_capabilities(files, traits),
        reasoning=traits.reasoning,
        chat=traits.chat,
        template=traits.template,
        system=files.system_prompt or "",
        messages=files.first_messages,
        license=files.license,
        parent=files.parent,
        defaults=defaults.sampling,
        max_tokens=defaults.max_tokens,
        stop=defaults.stop_strings,
        config=files.config,
    )


def _list_capabilities(files: ModelFiles, traits: ModelTraits) -> frozenset[Capability]:
    if find_rank_method(files) is not None:
        return frozenset({"rerank"})
    embeds = POOLING_MODE in files.config or Path(files.path, _EMBEDDING_FILE).is_file()
    if files.is_encoder or embeds:
        return frozenset({"embedding"})
    flags: tuple[tuple[Capability, bool], ...] = (
        ("completion", True),
        ("tools", traits.tools),
        ("insert", traits.infill),
        ("thinking", traits.reasoning != "none"),
    )
    return frozenset(name for name, is_set in flags if is_set)


def _compute_digest(files: ModelFiles) -> str:
    """Returns a digest of all properties that creating or downloading a model may change."""
    parts = (
        files.weights_digest,
        repr(sorted(files.config.items(), key=lambda item: item[0])),
        repr(sorted(files.generation_config.items(), key=lambda item: item[0])),
        repr((files.chat_template, files.system_prompt, files.first_messages, files.license)),
        repr((files.named_templates, files.added_tokens)),
    )
    return hashlib.sha256(chr(0).join(parts).encode(errors="replace")).hexdigest()


def read_model_traits(files: ModelFiles) -> ModelTraits:
    """Reads the traits of a model. Renders test conversations, so call it on a worker thread.
    Raises AppError(MODEL_FILES) if the template is broken, and OSError."""
    template = ChatTemplate(files)
    source = template.get_source(tools=True)
    family = find_family(source) or GenericFamily()
    return ModelTraits(
        chat=template.includes_special_tokens,
        tools=detect_capabilities(template.render).supports_tools,
        infill=has_infill_tokens(files.tokenizer_path.read_bytes()),
        reasoning=_read_reasoning(template) if family.reasoning_tags(source) else "none",
        template=source if template.includes_special_tokens else "",
    )


def _read_reasoning(template: ChatTemplate) -> ReasoningSupport:
    try:
        build_thinking_kwargs(
            ReasoningOptions(effort="none"),
            template.get_variables(tools=False),
            supports_reasoning=True,
            supports_none=NONE_EFFORT.search(template.get_source(tools=False)) is not None,
        )
    except AppError:
        return "always"
    return "optional"
