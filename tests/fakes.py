"""Fakes of the product's ports, driven by a script."""

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import tokenizers
from starlette.applications import Starlette
from tokenizers import models, pre_tokenizers

from app.api.app import build_app
from app.api.status import FrontendStats
from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Event,
    Finish,
    FinishReason,
    PromptTokenIds,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from app.core.jobs import Capacity, EngineStats, Ledger, PrefixSnapshot
from app.core.model_files import ModelDefaults
from app.core.models import (
    DownloadPreview,
    LibraryStep,
    ModelDetails,
    ModelRecipe,
    ModelState,
    TensorDetails,
)
from app.core.ports import ModelCard, ResolvedModel, RunnerStatus
from app.core.requests import Conversation, Embeddings, EmbedRequest, GenerateRequest, PromptBatch
from app.core.settings import Settings
from app.core.thread_pools import ThreadPools
from app.core.usage import ConnectionStats, EventLoopLag
from app.http.body import RequestBodies

STATS = EngineStats(
    allocated_bytes=123_456,
    running=2,
    waiting=3,
    cached_tokens=700,
    prefix_query_tokens=810,
    prefilled_tokens=90,
    generated_tokens=55,
    ledger=Ledger(
        budget=1000, weights=400, kv=250, prefix=100, working=50, prefix_limit=300, wired=700
    ),
    prefix_hit_counts=(4, 0, 1, 0, 2, 0, 0, 0, 1),
    prefix_miss_counts=(("empty", 4), ("diverged", 3)),
    prefix_evictions=6,
    preemptions=5,
    failures=1,
    steps=321,
)
CAPACITY = Capacity(parallel=2, context_length=4096, kv_budget=550, kv_bytes_per_sequence=500)
READY = RunnerStatus(state="ready", progress=100, stats=STATS, capacity=CAPACITY, rejected=9)
CARD = ModelCard(id="fake/model", created=1_700_000_000, context_length=4096)


DETAILS = ModelDetails(
    name=CARD.id,
    architecture="fake",
    parameters=8_190_735_360,
    quantization="int4",
    size=4_800_000_000,
    digest="ab" * 32,
    modified=1_700_000_000,
    context_length=4096,
    keep_alive=300.0,
    capabilities=frozenset({"completion", "tools", "insert", "thinking"}),
    reasoning="optional",
    template="{{ messages }}",
    config={"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32},
)


def make_rust_panic() -> BaseException:
    """The exception of a panic in a Rust library; only a real panic can create one. The regex
    engine panics after ten million backtracking steps."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
    try:
        tokenizer.encode("x" * 40)
    except BaseException as error:
        if not isinstance(error, Exception):
            return error
        raise
    raise AssertionError("no panic")


def make_front_end() -> FrontendStats:
    """The stats of an idle front end."""
    workers = ThreadPools()
    return FrontendStats(RequestBodies(Settings(), workers), workers, EventLoopLag())


@dataclass(frozen=True)
class Pause:
    """A pause in a script."""

    seconds: float


FOREVER = Pause(1e6)

Script = Sequence[Event | Sequence[Event] | Pause | asyncio.Event | Exception]
"""At an asyncio.Event, the script waits until the test sets it. A sequence is one batch."""


def text(text: str, *logprobs: TokenLogprob) -> TextDelta:
    return TextDelta(text=text, logprobs=logprobs)


def finish(reason: FinishReason = "stop", tokens: int = 2) -> Finish:
    return Finish(
        reason=reason,
        usage=Usage(prompt_tokens=7, completion_tokens=tokens, cached_tokens=3),
        timings=Timings(prefill_ns=2_000_000, decode_ns=30_000_000, total_ns=35_000_000),
    )


HELLO: Script = (text("Hel"), text("lo"), finish())


def script_greetings(request: GenerateRequest) -> Script:
    """`HELLO` from every choice, interleaved, after the token ids of the prompts if they were
    requested."""
    prompt = request.prompt
    num_prompts = len(prompt.prompts) if isinstance(prompt, PromptBatch) else 1
    ids = [PromptTokenIds(prompt_index=index, token_ids=(72, 105)) for index in range(num_prompts)]
    hel, lo, end = text("Hel"), text("lo"), finish()
    choices = range(num_prompts * request.n)
    return [
        *(ids if request.return_token_ids else ()),
        *(replace(hel, choice=choice) for choice in choices),
        *(replace(lo, choice=choice) for choice in choices),
        *(replace(end, choice=choice, prompt_index=choice // request.n) for choice in choices),
    ]


@dataclass(frozen=True)
class FakeModel:
    """Implements `ResolvedModel`."""

    card: ModelCard = CARD


@dataclass
class FakeGenerate:
    """`app.core.ports.Generate` and `Models` from a script of events, pauses and errors. The
    vocabulary is the 256 bytes.

    script: of every answer, or a function of the request. open_error: raised by `open`. opened,
    num_closed: the requests whose context was entered, and how many of these contexts were exited.
    resolved: names given to `resolve`. rescans: calls of `rescan`.
    """

    script: Script | Callable[[GenerateRequest], Script] = script_greetings
    open_error: Exception | None = None
    runner_status: RunnerStatus = READY
    cards: Sequence[ModelCard] = (CARD,)
    opened: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    num_closed: int = 0
    embedded: list[EmbedRequest] = field(default_factory=list[EmbedRequest])
    resolved: list[str | None] = field(default_factory=list[str | None])
    rescans: int = 0
    prefix_snapshot: PrefixSnapshot | None = None
    snapshots_requested: list[str] = field(default_factory=list[str])
    details: ModelDetails = DETAILS
    library: "FakeLibrary" = field(default_factory=lambda: FakeLibrary())
    loaded: list[tuple[str, float | None]] = field(default_factory=list[tuple[str, float | None]])
    unloaded: list[str] = field(default_factory=list[str])
    adapters: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    defaults: dict[str, ModelDefaults] = field(default_factory=dict[str, ModelDefaults])
    tokenized: list[tuple[str, str | None, bool]] = field(
        default_factory=list[tuple[str, str | None, bool]]
    )
    tokenized_chats: list[GenerateRequest] = field(default_factory=list[GenerateRequest])

    async def resolve(self, name: str | None) -> "FakeModel":
        self.resolved.append(name)
        if name is None:
            if not self.cards:
                message = "no model is available yet: try again in a moment"
                raise AppError(ErrorKind.LOADING, message)
            return FakeModel(self.cards[0])
        for candidate in (name, name.removesuffix(":latest")):
            for card in self.cards:
                if card.id == candidate:
                    return FakeModel(card)
        message = (
            f"the model {name[:200]!r} does not exist: GET /v1/models lists the available models"
        )
        raise AppError(ErrorKind.MODEL_NOT_FOUND, message, param="model")

    @asynccontextmanager
    async def open(
        self, request: GenerateRequest, model: ResolvedModel
    ) -> AsyncGenerator[AsyncIterator[Sequence[Event]]]:
        self._assert_served(model)
        if self.open_error is not None:
            raise self.open_error
        prompts = request.prompt
        for prompt in prompts.prompts if isinstance(prompts, PromptBatch) else (prompts,):
            if isinstance(prompt, tuple):
                await self.detokenize(model, prompt)
        self.opened.append(request)
        script = self.script(request) if callable(self.script) else self.script
        events = _run_script(script)
        try:
            yield events
        finally:
            # Fails if a task still waits for an event after the context was exited.
            await events.aclose()
            self.num_closed += 1

    async def embed(self, request: EmbedRequest, model: ResolvedModel) -> Embeddings:
        """For each input, a vector of four numbers, with its index and its length; with a query, a
        score that grows with the length."""
        self._assert_served(model)
        if self.open_error is not None:
            raise self.open_error
        for one in request.inputs:
            if isinstance(one.content, tuple):
                ids = [part for part in one.content if isinstance(part, int)]
                await self.detokenize(model, ids)
        self.embedded.append(request)
        vectors = [
            struct.pack("<4f", index, len(one.content), 0.5, -0.25)[: 4 * (request.dimensions or 4)]
            for index, one in enumerate(request.inputs)
        ]
        if request.query is not None:
            vectors = [struct.pack("<f", len(one.content) / 64) for one in request.inputs]
        tokens = sum(len(one.content) for one in request.inputs)
        return Embeddings(vectors=tuple(vectors), prompt_tokens=tokens)

    async def tokenize(
        self, model: ResolvedModel, text: str, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        self.tokenized.append((text, model.card.id, add_special_tokens))
        return list(text.encode())

    async def tokenize_chat(self, model: ResolvedModel, request: GenerateRequest) -> Sequence[int]:
        """One token for each byte of the messages."""
        if self.open_error is not None:
            raise self.open_error
        self.tokenized_chats.append(request)
        assert isinstance(request.prompt, Conversation)
        return list("".join(m.content or "" for m in request.prompt.messages).encode())

    async def render_chat(self, model: ResolvedModel, request: GenerateRequest) -> str:
        return bytes(await self.tokenize_chat(model, request)).decode()

    async def get_token_bytes(self, model: ResolvedModel, ids: Sequence[int]) -> Sequence[bytes]:
        return [bytes([id_]) for id_ in ids]

    async def get_tokenizer_info(self, model: ResolvedModel) -> Mapping[str, Any]:
        return {"tokenizer_class": "Bytes", "eos_token": None, "bos_token": None}

    async def detokenize(self, model: ResolvedModel, ids: Sequence[int]) -> str:
        if any(id_ > 255 for id_ in ids):
            raise AppError(ErrorKind.INVALID, "there are only 256 tokens", param="tokens")
        return bytes(ids).decode(errors="replace")

    def _assert_served(self, model: ResolvedModel) -> None:
        assert model.card.id in {card.id for card in self.cards}

    async def rescan(self) -> None:
        self.rescans += 1

    def model_state(self, model: ResolvedModel) -> ModelState:
        return next(s for s in self.list_model_states() if s.name == model.card.id)

    def list_model_states(self) -> Sequence[ModelState]:
        """Every model has the state of the runner."""
        status = self.runner_status
        phase = "loading" if status.state == "loading" else status.state
        return [
            ModelState(
                name=card.id,
                phase=phase,
                progress=status.progress,
                stats=status.stats,
                preparing=status.preparing,
                compiling=status.compiling,
                rejected=status.rejected,
                context_length=card.context_length,
                parallel=status.capacity.parallel if status.capacity else None,
                error=status.error,
            )
            for card in self.cards
        ]

    async def describe(self, model: ResolvedModel) -> ModelDetails:
        return replace(self.details, name=model.card.id)

    async def list_details(self) -> Sequence[ModelDetails]:
        self.rescans += 1
        return [replace(self.details, name=card.id) for card in self.cards]

    async def list_tensors(self, model: ResolvedModel) -> Sequence[TensorDetails]:
        return [TensorDetails(name="lm_head.weight", dtype="BF16", shape=(256, 64))]

    async def load(
        self, model: ResolvedModel, keep_alive: float | None = None, *, admin: bool = True
    ) -> ModelState:
        if self.open_error is not None:
            raise self.open_error
        self.loaded.append((model.card.id, keep_alive))
        return self.model_state(model)

    def get_defaults(self, model: ResolvedModel) -> ModelDefaults:
        return self.defaults.get(model.card.id) or ModelDefaults(name=model.card.id)

    async def set_defaults(self, model: ResolvedModel, defaults: ModelDefaults) -> bool:
        if self.open_error is not None:
            raise self.open_error
        self.defaults[model.card.id] = defaults
        return True

    async def unload(self, model: ResolvedModel) -> ModelState:
        if self.open_error is not None:
            raise self.open_error
        self.unloaded.append(model.card.id)
        return replace(self.model_state(model), phase="unloaded")

    async def load_adapter(
        self, model: ResolvedModel, name: str, path: str, *, in_place: bool = False
    ) -> None:
        if self.open_error is not None:
            raise self.open_error
        self.adapters.append((model.card.id, name, path, *(["in place"] if in_place else [])))

    async def unload_adapter(self, model: ResolvedModel, name: str) -> None:
        if self.open_error is not None:
            raise self.open_error
        self.adapters.append((model.card.id, name))

    def list_models(self) -> Sequence[ModelCard]:
        return self.cards

    def get_prefix_snapshot(self, name: str) -> PrefixSnapshot | None:
        self.snapshots_requested.append(name)
        return self.prefix_snapshot

    def status(self) -> RunnerStatus:
        return self.runner_status


@dataclass
class FakeBlob:
    """Implements `BlobWriter`."""

    library: "FakeLibrary"
    digest: str
    content: bytes = b""

    async def write(self, data: bytes) -> None:
        self.content += data

    async def commit(self) -> None:
        self.library.blobs[self.digest] = self.content


PREVIEW = DownloadPreview(
    name="org/model",
    commit="0" * 40,
    size=3_000_000_000,
    missing=2_000_000_000,
    context_length=4096,
    memory_needed=4 << 30,
    memory_available=8 << 30,
    disk_available=5_000_000_000,
)


@dataclass
class FakeLibrary:
    """`app.core.ports.ModelLibrary` without a disk. steps: of every pull and creation; an exception
    among them is raised. calls: what was done, in order. stopped: closed generators."""

    steps: Sequence[LibraryStep | Pause | Exception] = (LibraryStep(status="success"),)
    calls: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    blobs: dict[str, bytes] = field(default_factory=dict[str, bytes])
    stopped: int = 0
    previewed: DownloadPreview = PREVIEW

    async def _run(self) -> AsyncGenerator[LibraryStep]:
        try:
            for step in self.steps:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.stopped += 1

    async def preview(self, name: str) -> DownloadPreview:
        self.calls.append(("preview", name))
        return self.previewed

    def pull(self, name: str) -> AsyncGenerator[LibraryStep]:
        self.calls.append(("pull", name))
        return self._run()

    def create(self, recipe: ModelRecipe) -> AsyncGenerator[LibraryStep]:
        self.calls.append(("create", recipe))
        return self._run()

    async def copy(self, source: str, destination: str) -> None:
        self.calls.append(("copy", source, destination))

    async def delete(self, name: str) -> None:
        self.calls.append(("delete", name))

    async def has_blob(self, digest: str) -> bool:
        return digest in self.blobs

    @asynccontextmanager
    async def upload_blob(self, digest: str) -> AsyncGenerator[FakeBlob]:
        yield FakeBlob(self, digest)


def build_fake_app(generate: Any, settings: Settings, **options: Any) -> Starlette:
    """`build_app` with one object that implements `Generate` and `Models`. The stream of engine
    events, which does not end by itself, ends after the first events, as while a server stops."""
    options.setdefault("traffic", ConnectionStats(shutting_down=True))
    return build_app(generate, generate, settings, **options)


async def _run_script(script: Script) -> AsyncGenerator[Sequence[Event]]:
    for step in script:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        elif isinstance(step, asyncio.Event):
            await step.wait()
        elif isinstance(step, Exception):
            raise step
        elif isinstance(step, Sequence):
            yield step
        else:
            yield [step]
