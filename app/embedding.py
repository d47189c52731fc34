"""Texts → vectors: encode → a job for the runner → vectors.

Knows: the tokenizer, what the model's folder says of pooling, the `Engine` protocol. Must not know:
HTTP, tensors, how hidden states are pooled. Whoever stops waiting cancels the job.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from app.core.embeddings import Embeddings, EmbedInput, EmbedJob, EmbedRequest, Pooling
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.jobs import Capacity
from app.core.ports import Engine
from app.core.room import Room
from app.core.workers import CancelToken, Workers
from app.text.tokenizer import Tokenizer

# all inputs of a request together, as OpenAI bounds them: what is asked for more is asked for twice
MOST_TOKENS = 300_000

# the files of sentence-transformers that say how its vectors are made, and the kinds of its modules
# that do nothing here, or what happens here anyway
_MODULES, _POOLING, _FLAG = "modules.json", "1_Pooling/config.json", "pooling_mode_"
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_KNOWN_POOLINGS: Mapping[str, Pooling] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the model's makers want its vectors made. problem: a clause, where they want something
    that is not here."""

    pooling: Pooling = "mean"
    problem: str | None = None


class Embedding:
    """For one model. room: how long an input may be, asked anew for each request."""

    def __init__(
        self,
        files: ModelFiles,
        engine: Engine,
        tokenizer: Tokenizer,
        room: Callable[[], Room],
        workers: Workers,
    ) -> None:
        self._files = files
        self._engine = engine
        self._tokenizer = tokenizer
        self._room = room
        self._workers = workers
        self._recipe = recipe(files)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Raises AppError(INVALID) for what this model has no vectors of, AppError(CONTEXT_LENGTH)
        naming the input that is too long, and whatever the runner raises."""
        self._files.check_asked(request.model)
        pooling = self._pooling(request)
        with self._engine.reserve() as places:
            inputs = await self._prepared(request)
            if (capacity := self._engine.status().capacity) is not None:
                _check_width(request, capacity)
            job = EmbedJob(
                id=uuid.uuid4().hex, inputs=inputs, pooling=pooling, dimensions=request.dimensions
            )
            vectors = await places.embed(job)
        return Embeddings(vectors=tuple(vectors), tokens=sum(map(len, inputs)))

    async def _prepared(self, request: EmbedRequest) -> tuple[tuple[int, ...], ...]:
        room = self._room()
        return await self._workers.run_cancellable(
            lambda token: self._encoded(request.inputs, room, token),
            size=sum(len(one.content) for one in request.inputs),
            key=f"{request.caller}/{self._files.name}",
        )

    def _pooling(self, request: EmbedRequest) -> Pooling:
        if request.pooling is not None:
            return request.pooling
        if self._recipe.problem is not None:
            raise AppError(
                Kind.INVALID,
                f"the pooling of this model is not supported: "
                f'{self._recipe.problem}; set "pooling" to "mean" or "last"',
                param="pooling",
            )
        return self._recipe.pooling

    def _encoded(
        self, inputs: Sequence[EmbedInput], room: Room, token: CancelToken
    ) -> tuple[tuple[int, ...], ...]:
        """Work for a worker thread. Raises as `embed` does; Cancelled when `token` is."""
        encoded: list[tuple[int, ...]] = []
        total = 0
        for one in inputs:
            token.check()
            encoded.append(self._ids(one, room))
            total += len(encoded[-1])
            if total > MOST_TOKENS:
                raise AppError(
                    Kind.INVALID,
                    f"the inputs up to {one.at} have {total} tokens, but one request can have at "
                    f"most {MOST_TOKENS}: send fewer inputs per request",
                    param="input",
                )
        return tuple(encoded)

    def _ids(self, one: EmbedInput, room: Room) -> tuple[int, ...]:
        more = ""
        if isinstance(one.content, str):
            text = self._tokenizer.enough_of(one.content, room.context)
            more = "more than " if len(text) < len(one.content) else ""
            ids = tuple(self._tokenizer.encode_whole(text))
        else:
            ids = one.content
        self._check_ids(ids, one.at)
        if len(ids) > room.context:
            raise AppError(
                Kind.CONTEXT_LENGTH,
                f"{one.at} has {more}{len(ids)} tokens, but an input can have at most "
                f"{room.context}: shorten it, or split it",
                param=one.at,
            )
        return ids

    def _check_ids(self, ids: Sequence[int], at: str) -> None:
        if not ids:
            raise AppError(Kind.INVALID, f"{at} has no tokens", param=at)
        count = self._files.vocab_size
        for token in (min(ids), max(ids)):
            if not 0 <= token < count:
                raise AppError(
                    Kind.INVALID,
                    f"{at}: {token} is not a token id of this model, whose ids are 0 to "
                    f"{count - 1}; use the ids of this model's tokenizer",
                    param=at,
                )


def recipe(files: ModelFiles) -> Recipe:
    """What sentence-transformers would do with the model's folder; the mean, where it is no model
    of theirs. Source: modules.json and 1_Pooling/config.json as that library saves them (5.1)."""
    if files.config.get("is_causal") is False or files.config.get("use_bidirectional_attention"):
        return Recipe(
            problem="it needs bidirectional attention, and only causal attention is supported"
        )
    for module in _objects(_read(files.path / _MODULES)):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _KNOWN_MODULES:
            return Recipe(problem=f"modules.json contains the unsupported module {kind}")
    for config in _objects([_read(files.path / _POOLING)]):
        return _pooled(config)
    return Recipe()


def _pooled(config: Mapping[str, Any]) -> Recipe:
    """Newer files say it in a word, older ones with a flag for each way."""
    said = config.get("pooling_mode")
    flags = [key.removeprefix(_FLAG) for key in config if key.startswith(_FLAG) and config[key]]
    wanted = [str(said)] if said is not None else flags
    if len(wanted) == 1 and wanted[0] in _KNOWN_POOLINGS:
        return Recipe(pooling=_KNOWN_POOLINGS[wanted[0]])
    return Recipe(problem=f"its pooling is {' and '.join(wanted) or 'none'}")


def _read(path: Path) -> object:
    """Parsed JSON; None where there is none that can be read."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _objects(value: object) -> list[Mapping[str, Any]]:
    """Those in a list; none in what is no list."""
    items = cast(list[object], value) if isinstance(value, list) else []
    return [cast(Mapping[str, Any], item) for item in items if isinstance(item, dict)]


def _check_width(request: EmbedRequest, capacity: Capacity) -> None:
    if capacity.width is None:
        raise AppError(
            Kind.INVALID,
            "this model runs through mlx-lm, which returns logits and no hidden states: it cannot "
            "compute embeddings",
            param="model",
        )
    if request.dimensions is not None and request.dimensions > capacity.width:
        raise AppError(
            Kind.INVALID,
            f"this model's embeddings have {capacity.width} dimensions: dimensions cannot be "
            f"{request.dimensions}",
            param="dimensions",
        )
