"""Computes embeddings, and scores of documents for a query: tokenizes the inputs and submits a job
to the engine.

Knows: the tokenizer, the model's pooling and way of scoring, the `Engine` protocol. Must not know:
HTTP, tensors, the pooling of hidden states. Cancelling a request cancels its job.
"""

import math
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence

from app.core.errors import AppError, ErrorKind
from app.core.jobs import Capacity, ContextLimit
from app.core.model_files import ModelFiles
from app.core.ports import Engine
from app.core.requests import Embeddings, EmbedInput, EmbedJob, EmbedRequest, PoolingType
from app.core.thread_pools import CancelToken, ThreadPools
from app.core.units import pluralize
from app.serving.pooling_config import find_rank_method, read_pooling_config
from app.text.tokenizer import Tokenizer

# the maximum number of tokens in all inputs of a request, like OpenAI's limit
MAX_INPUT_TOKENS = 300_000

# The published prompt of Qwen3-Reranker, and the tokens whose logits are compared.
_YES_NO_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: "
)
_YES_NO_DOCUMENT = "\n<Document>: "
_YES_NO_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_YES_NO_TOKENS = ("yes", "no")


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
        self._rank_method = find_rank_method(files)

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Computes the embeddings of a request. Raises AppError(INVALID) for a request that the
        model does not support, AppError(CONTEXT_LENGTH) for an input that is too long, and the
        errors of the runner."""
        if request.query is not None:
            return await self._rank(request, request.query)
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

    async def _rank(self, request: EmbedRequest, query: str) -> Embeddings:
        """Computes one score per input."""
        if self._rank_method is None:
            raise AppError(
                ErrorKind.INVALID,
                f"{self._files.name} was not trained to score documents: use a reranker, such as "
                "BAAI/bge-reranker-v2-m3 or Qwen/Qwen3-Reranker-0.6B",
                param="model",
            )
        classifier = self._rank_method == "classifier"
        with self._engine.reserve() as places:
            room = self._context_limit().context_length
            encode = self._encode_pair if classifier else self._encode_yes_no
            pairs = await self._workers.run_cancellable(
                lambda token: self._encode_pairs(request, query, encode, room, token),
                size=sum(len(one.content) + len(query) for one in request.inputs),
                key=f"{request.caller}/{self._files.name}",
            )
            job = EmbedJob(
                id=uuid.uuid4().hex,
                inputs=tuple(ids for ids, _ in pairs),
                pooling="rank" if classifier else "last",
                first_segments=tuple(count for _, count in pairs) if classifier else (),
                logit_ids=() if classifier else self._yes_no_ids(),
            )
            results = await places.embed(job)
        return Embeddings(
            vectors=tuple(_to_probability(result) for result in results),
            prompt_tokens=sum(len(ids) for ids, _ in pairs),
        )

    def _encode_pairs(
        self,
        request: EmbedRequest,
        query: str,
        encode: Callable[[str, str, int], tuple[tuple[int, ...], int]],
        room: int,
        token: CancelToken,
    ) -> list[tuple[tuple[int, ...], int]]:
        """Tokenizes the query with each input on a worker thread, as `_encode_inputs` does. The
        end of an input that is too long is removed."""
        query = self._tokenizer.truncate_text(query, room)
        pairs: list[tuple[tuple[int, ...], int]] = []
        total = 0
        for one in request.inputs:
            token.check()
            assert isinstance(one.content, str), "a document is a text"
            document = self._tokenizer.truncate_text(one.content, room)
            pairs.append(encode(query, document, room))
            total += len(pairs[-1][0])
            self._check_total(total, one.param)
        return pairs

    def _encode_pair(self, query: str, document: str, room: int) -> tuple[tuple[int, ...], int]:
        ids, first = self._tokenizer.encode_pair(query, document, room)
        self._check_ids(ids, "documents")
        return tuple(ids), first

    def _encode_yes_no(self, query: str, document: str, room: int) -> tuple[tuple[int, ...], int]:
        """Encodes the prompt of a model that answers yes or no."""
        start = self._tokenizer.encode(
            f"{_YES_NO_PREFIX}{query}{_YES_NO_DOCUMENT}", add_special_tokens=True
        )
        end = self._tokenizer.encode(_YES_NO_SUFFIX, add_special_tokens=False)
        left = room - len(start) - len(end)
        if left <= 0:
            raise AppError(
                ErrorKind.CONTEXT_LENGTH,
                f"the query has too many tokens: a query and a document can have at most {room} "
                "tokens together; shorten the query",
                param="query",
            )
        middle = self._tokenizer.encode(document, add_special_tokens=False)
        ids = (*start, *middle[:left], *end)
        self._check_ids(ids, "documents")
        return ids, len(ids)

    def _yes_no_ids(self) -> tuple[int, ...]:
        ids = [self._tokenizer.token_to_id(token) for token in _YES_NO_TOKENS]
        if None in ids:
            raise AppError(
                ErrorKind.INVALID,
                f"the tokenizer of {self._files.name} has no tokens {_YES_NO_TOKENS}: the model is "
                "not a Qwen3-Reranker",
                param="model",
            )
        return tuple(id for id in ids if id is not None)

    def _check_total(self, total: int, param: str) -> None:
        if total > MAX_INPUT_TOKENS:
            raise AppError(
                ErrorKind.INVALID,
                f"the inputs up to {param} have {total} tokens, but one request can have at most "
                f"{MAX_INPUT_TOKENS}: send fewer inputs per request",
                param="input",
            )

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
                f'{self._pooling_config.unsupported}; set "pooling" to "mean", "cls" or "last"',
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
            self._check_total(total, one.param)
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
        if truncate and len(ids) > context_limit.context_length:
            end = self._tokenizer.suffix_ids
            ids = (*ids[: context_limit.context_length - len(end)], *end)
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
        """Only text at the start gets the special tokens of a prompt, as in llama.cpp."""
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


def _to_probability(result: bytes) -> bytes:
    """Converts the logit of a classifier, or those of "yes" and "no", to a number from 0 to 1."""
    logits = array("f", result)
    logit = logits[0] - (logits[1] if len(logits) > 1 else 0.0)
    score = 1 / (1 + math.exp(-logit)) if logit > -80 else 0.0
    return array("f", [score]).tobytes()
