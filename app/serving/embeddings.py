"""Computes embeddings: tokenizes the inputs and submits a job to the engine.

Knows: the tokenizer, the pooling configuration in the model's folder, the `Engine` protocol. Must
not know: HTTP, tensors, the pooling of hidden states. Cancelling a request cancels its job.
"""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.jobs import Capacity, ContextLimit
from app.core.model_files import ModelFiles
from app.core.ports import Engine
from app.core.requests import Embeddings, EmbedInput, EmbedJob, EmbedRequest, PoolingType
from app.core.thread_pools import CancelToken, ThreadPools
from app.core.units import pluralize
from app.text.tokenizer import Tokenizer

# the maximum number of tokens in all inputs of a request, like OpenAI's limit
MAX_INPUT_TOKENS = 300_000

# the configuration files of sentence-transformers, and its module types that can be ignored,
# because they do not affect the embeddings or are always computed
_MODULES_FILE, _POOLING_FILE, _POOLING_FLAG_PREFIX = (
    "modules.json",
    "1_Pooling/config.json",
    "pooling_mode_",
)
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_KNOWN_POOLINGS: Mapping[str, PoolingType] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """The pooling configured by the model's authors. unsupported: a clause with the reason why the
    pooling is not supported; None if it is supported."""

    pooling: PoolingType = "mean"
    unsupported: str | None = None


class EmbeddingService:
    """Computes the embeddings of one model. context_limit: returns the maximum length of an input;
    called for each request."""

    def __init__(
        self,
        files: ModelFiles,
        engine: Engine,
        tokenizer: Tokenizer,
        context_limit: Callable[[], ContextLimit],
        workers: ThreadPools,
    ) -> None:
        self._files = files
        self._engine = engine
        self._tokenizer = tokenizer
        self._context_limit = context_limit
        self._workers = workers
        self._pooling_config = read_pooling_config(files)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Computes the embeddings of a request. Raises AppError(INVALID) for a request that the
        model does not support, AppError(CONTEXT_LENGTH) for an input that is too long, and the
        errors of the runner."""
        pooling = self._resolve_pooling(request)
        with self._engine.reserve() as places:
            inputs = await self._encode_on_thread(request)
            if (capacity := self._engine.status().capacity) is not None:
                _check_dimensions(request, capacity)
            job = EmbedJob(
                id=uuid.uuid4().hex, inputs=inputs, pooling=pooling, dimensions=request.dimensions
            )
            vectors = await places.embed(job)
        return Embeddings(vectors=tuple(vectors), prompt_tokens=sum(map(len, inputs)))

    async def _encode_on_thread(self, request: EmbedRequest) -> tuple[tuple[int, ...], ...]:
        room = self._context_limit()
        return await self._workers.run_cancellable(
            lambda token: self._encode_inputs(request, room, token),
            size=sum(len(one.content) for one in request.inputs),
            key=f"{request.caller}/{self._files.name}",
        )

    def _resolve_pooling(self, request: EmbedRequest) -> PoolingType:
        if request.pooling is not None:
            return request.pooling
        if self._pooling_config.unsupported is not None:
            raise AppError(
                ErrorKind.INVALID,
                f"the pooling of this model is not supported: "
                f'{self._pooling_config.unsupported}; set "pooling" to "mean" or "last"',
                param="pooling",
            )
        return self._pooling_config.pooling

    def _encode_inputs(
        self, request: EmbedRequest, context_limit: ContextLimit, token: CancelToken
    ) -> tuple[tuple[int, ...], ...]:
        """Tokenizes the inputs on a worker thread. Raises the same errors as `embed`, and
        WorkCancelled when `token` is cancelled."""
        encoded: list[tuple[int, ...]] = []
        total = 0
        for one in request.inputs:
            token.check()
            encoded.append(self._encode_input(one, context_limit, truncate=request.truncate))
            total += len(encoded[-1])
            if total > MAX_INPUT_TOKENS:
                raise AppError(
                    ErrorKind.INVALID,
                    f"the inputs up to {one.param} have {total} tokens, but one request "
                    "can have at "
                    f"most {MAX_INPUT_TOKENS}: send fewer inputs per request",
                    param="input",
                )
        return tuple(encoded)

    def _encode_input(
        self, one: EmbedInput, context_limit: ContextLimit, *, truncate: bool
    ) -> tuple[int, ...]:
        more = ""
        if isinstance(one.content, str):
            text = self._tokenizer.truncate_text(one.content, context_limit.context_length)
            more = "more than " if len(text) < len(one.content) else ""
            ids = tuple(self._tokenizer.encode_for_embedding(text))
        else:
            ids = tuple(self._encode_parts(one.content, context_limit.context_length))
        if truncate:
            ids = ids[: context_limit.context_length]
        self._check_ids(ids, one.param)
        if len(ids) > context_limit.context_length:
            raise AppError(
                ErrorKind.CONTEXT_LENGTH,
                f"{one.param} is too large: it has {more}{pluralize(len(ids), 'token')}, but an "
                f"input can have at most {context_limit.context_length}: shorten it, or split it",
                param=one.param,
            )
        return ids

    def _encode_parts(self, parts: Sequence[int | str], context_length: int) -> Iterator[int]:
        """Only a text at the start gets the special tokens of a prompt, as in llama.cpp."""
        for index, part in enumerate(parts):
            if isinstance(part, int):
                yield part
            else:
                text = self._tokenizer.truncate_text(part, context_length)
                yield from self._tokenizer.encode(text, add_special_tokens=index == 0)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if not ids:
            raise AppError(ErrorKind.INVALID, f"{param} has no tokens", param=param)
        count = self._files.vocab_size
        for token in (min(ids), max(ids)):
            if not 0 <= token < count:
                raise AppError(
                    ErrorKind.INVALID,
                    f"{param}: {token} is not a token ID of this model, whose IDs are 0 to "
                    f"{count - 1}: use this model's tokenizer",
                    param=param,
                )


def read_pooling_config(files: ModelFiles) -> PoolingConfig:
    """Reads the pooling that sentence-transformers would use for the model's folder. The default is
    mean pooling. Reads modules.json and 1_Pooling/config.json, as saved by sentence-transformers
    5.1."""
    if files.config.get("is_causal") is False or files.config.get("use_bidirectional_attention"):
        return PoolingConfig(
            unsupported="it needs bidirectional attention, and only causal attention is supported"
        )
    for module in _filter_objects(_read_json(files.path / _MODULES_FILE)):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _KNOWN_MODULES:
            return PoolingConfig(unsupported=f"modules.json contains the unsupported module {kind}")
    for config in _filter_objects([_read_json(files.path / _POOLING_FILE)]):
        return _parse_pooling(config)
    return PoolingConfig()


def _parse_pooling(config: Mapping[str, Any]) -> PoolingConfig:
    """Parses 1_Pooling/config.json. Newer files contain a name, older files one flag per pooling
    mode."""
    mode = config.get("pooling_mode")
    flags = [
        key.removeprefix(_POOLING_FLAG_PREFIX)
        for key in config
        if key.startswith(_POOLING_FLAG_PREFIX) and config[key]
    ]
    poolings = [str(mode)] if mode is not None else flags
    if len(poolings) == 1 and poolings[0] in _KNOWN_POOLINGS:
        return PoolingConfig(pooling=_KNOWN_POOLINGS[poolings[0]])
    return PoolingConfig(unsupported=f"its pooling is {' and '.join(poolings) or 'none'}")


def _read_json(path: Path) -> object:
    """Parses a JSON file. Returns None if the file is missing or invalid."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _filter_objects(value: object) -> list[Mapping[str, Any]]:
    """Returns the objects of a JSON list. The result is empty if `value` is not a list."""
    items = cast(list[object], value) if isinstance(value, list) else []
    return [cast(Mapping[str, Any], item) for item in items if isinstance(item, dict)]


def _check_dimensions(request: EmbedRequest, capacity: Capacity) -> None:
    if capacity.hidden_size is None:
        raise AppError(
            ErrorKind.INVALID,
            "this model runs through mlx-lm, which returns logits and no hidden states: it cannot "
            "compute embeddings",
            param="model",
        )
    if request.dimensions is not None and request.dimensions > capacity.hidden_size:
        raise AppError(
            ErrorKind.INVALID,
            f"this model's embeddings have {capacity.hidden_size} dimensions: dimensions cannot be "
            f"{request.dimensions}",
            param="dimensions",
        )
