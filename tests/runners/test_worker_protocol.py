"""The messages between a model process and its parent."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, ValidationError
from msgspec.msgpack import Decoder

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.images import ImagePixels, ImageSpan, Pixels, make_row_id
from app.core.jobs import (
    Capacity,
    ComputeBackend,
    Ended,
    EngineFailed,
    EngineReady,
    EngineStats,
    GetPrefixSnapshot,
    Heartbeat,
    Job,
    LoadAdapter,
    LoadProgress,
    PixelsNeeded,
    Prefilled,
    PrefixNode,
    PrefixSnapshot,
    PromptLogprobs,
    SetSpareMemory,
    Started,
    StepOutput,
    Token,
    UnloadAdapter,
)
from app.core.model_files import ModelFiles
from app.core.requests import EmbedJob, EmbedResult, JsonSchema, LarkGrammar, Regex
from app.core.sampling_params import SamplingParams
from app.core.settings import ModelSettings, Settings
from app.runners import worker_protocol
from app.runners.channel import encode
from app.runners.worker_protocol import (
    Call,
    CallReply,
    Cancel,
    Embed,
    Embedded,
    EventJoiner,
    JobAccepted,
    JobReceived,
    Probe,
    ProbeReply,
    PromptScoresChunk,
    ProvideImages,
    Rejected,
    Submit,
    WorkerInit,
)


def scores(count: int, top: int = 2) -> worker_protocol.Scores:
    return tuple((-i / 7, tuple((j, -j / 3) for j in range(top))) for i in range(count))


@given(counts=st.lists(st.sampled_from([0, 1, 511, 512, 513, 1500]), max_size=3))
def test_long_scores_are_split_and_joined(counts: list[int]):
    updates = [
        Started(job_id="x", cached_tokens=0, timestamp_ns=1),
        *(PromptLogprobs(job_id=f"job {i}", logprobs=scores(n)) for i, n in enumerate(counts)),
        Token(job_id="y", id=1, timestamp_ns=2),
    ]
    step = StepOutput(updates=tuple(updates), stats=EngineStats(steps=3))
    pieces = list(worker_protocol.split_step(step))
    joiner = EventJoiner()
    for piece in pieces[:-1]:
        assert isinstance(piece, PromptScoresChunk)
        joiner.add_scores(piece)
    assert isinstance(pieces[-1], StepOutput)
    assert joiner.join_step(pieces[-1]) == step
    for piece in pieces:
        parts = [piece] if isinstance(piece, PromptScoresChunk) else piece.updates
        lengths = [
            len(p.scores if isinstance(p, PromptScoresChunk) else p.logprobs)
            for p in parts
            if isinstance(p, (PromptScoresChunk, PromptLogprobs))
        ]
        assert all(length <= 512 for length in lengths)


def test_no_message_has_too_many_alternatives():
    """Also if several prompts are complete in one step."""
    top = tuple((id, -1.0) for id in range(30_000))
    updates = [PromptLogprobs(job_id=job, logprobs=((-1.0, top),) * 7) for job in "ab"]
    step = StepOutput(updates=tuple(updates), stats=EngineStats())
    *chunks, rest = worker_protocol.split_step(step)
    joiner = EventJoiner()
    for chunk in chunks:
        assert isinstance(chunk, PromptScoresChunk)
        assert len(chunk.scores) in (4, 3)
        joiner.add_scores(chunk)
    assert isinstance(rest, StepOutput)
    assert joiner.join_step(rest) == step
    assert all(isinstance(u, PromptLogprobs) and not u.logprobs for u in rest.updates)


def test_a_step_without_scores_is_one_message():
    step = StepOutput(updates=(Token(job_id="a", id=1, timestamp_ns=2),), stats=EngineStats())
    assert list(worker_protocol.split_step(step)) == [step]


@given(sizes=st.lists(st.sampled_from([1, 4, 1000]), max_size=3), count=st.integers(0, 3000))
def test_embeddings_are_split_and_joined(sizes: list[int], count: int):
    joiner, results = EventJoiner(), list[EmbedResult]()
    expected = [
        EmbedResult(job_id=f"job {i}", vectors=tuple(bytes([j % 256]) * size for j in range(count)))
        for i, size in enumerate(sizes)
    ]
    for result in expected:
        for chunk in worker_protocol.split_embeddings(result):
            assert len(encode(chunk)) < 300_000
            if (joined := joiner.join_embeddings(chunk)) is not None:
                results.append(joined)
    assert results == expected


def test_a_failed_embedding_keeps_its_error():
    failed = EmbedResult(job_id="a", error="no memory")
    [chunk] = worker_protocol.split_embeddings(failed)
    assert EventJoiner().join_embeddings(chunk) == failed


def test_an_error_keeps_all_its_fields():
    error = AppError(
        ErrorKind.INVALID,
        f"no such {mark_client_text('grammar')}",
        param="response_format",
        code="grammar",
        retry_after=3,
    )
    rejected = worker_protocol.WORKER_EVENT.decode(encode(Rejected.from_error("a", error)))
    assert isinstance(rejected, Rejected)
    assert vars(rejected.to_error()) == vars(error)


@pytest.mark.parametrize(("watchdog", "seconds"), [(60.0, 1.0), (4.0, 1.0), (0.4, 0.1)])
def test_several_probes_fit_in_the_time_of_the_watchdog(watchdog: float, seconds: float):
    assert worker_protocol.probe_interval(Settings(watchdog=watchdog)) == seconds


def settings_with_forever() -> Settings:
    return Settings(models=(ModelSettings(name="m", keep_alive=math.inf),), keep_alive=math.inf)


FILES = ModelFiles(
    name="a",
    path=Path("/x/\udcff"),  # not valid UTF-8
    config={"n": [1, 2.5, None, {"a": "é"}]},
    shards=(Path("/x/1"),),
    tokenizer_path=Path("/x/t"),
    tokenizer_config={},
    generation_config={},
    chat_template=None,
    created=1,
    first_messages=(("user", "hi"),),
)
GRAMMAR = LarkGrammar(
    text="a", parts=(Regex(pattern="b"), JsonSchema(text="{}")), inner=LarkGrammar(text="c")
)
KEY = bytes(range(32))
PIXELS = ImagePixels(key=KEY, tiles=(Pixels(height=1, width=2, data=b"rgbrgb"),))
JOB = Job(
    id="a",
    prompt_token_ids=(1, 2**31, make_row_id(KEY, 0), -(2**62)),
    sampling=SamplingParams(logit_bias=((3, -1.5),), bad_words=((1, 2), (3,)), seed=2**63 - 1),
    max_tokens=5,
    stop_token_ids=frozenset({1, 2}),
    grammar=GRAMMAR,
    message_ends=(1,),
    images=(ImageSpan(key=KEY, start=2, length=1, grid=(1, 1)),),
)
READY = EngineReady(
    stats=EngineStats(prefix_miss_counts=(("empty", 1),)),
    capacity=Capacity(
        parallel=1,
        context_length=2,
        kv_budget=3,
        kv_bytes_per_sequence=4,
        backend=ComputeBackend(device="cpu", kernels="avx2"),
    ),
)
STEP = StepOutput(
    updates=(
        Started(job_id="a", cached_tokens=0, timestamp_ns=1),
        PixelsNeeded(job_id="a", keys=(KEY,)),
        Prefilled(job_id="a", computed_tokens=2),
        # A token that a model masks has a logprob of minus infinity.
        PromptLogprobs(job_id="a", logprobs=((-math.inf, ((1, math.inf),)),)),
        Token(job_id="a", id=1, timestamp_ns=2, logprob=-math.inf, top_logprobs=((3, -0.1),)),
        Ended(job_id="a", reason="error", timestamp_ns=3, error="x"),
    ),
    stats=EngineStats(steps=1),
)
BEAT = Heartbeat(timestamp_ns=1, stage="decode, batch size 8")
SNAPSHOT = PrefixSnapshot(nodes=(PrefixNode(parent=None, start=0, tokens=1, last_used=0.5),))


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            worker_protocol.WORKER_INIT,
            WorkerInit(parent_pid=1, settings=settings_with_forever(), files=FILES),
        ),
        (worker_protocol.COMMAND, Submit(job=JOB)),
        (worker_protocol.COMMAND, Embed(job=EmbedJob(id="b", inputs=((1,), (2,)), pooling="last"))),
        (worker_protocol.COMMAND, ProvideImages(job="a", images=(PIXELS,))),
        (worker_protocol.COMMAND, Cancel(job="a", keep=None)),
        (worker_protocol.COMMAND, Probe()),
        (worker_protocol.COMMAND, Call(id="call 1", call=GetPrefixSnapshot())),
        (worker_protocol.COMMAND, Call(id="call 2", call=SetSpareMemory(num_bytes=1 << 40))),
        (worker_protocol.COMMAND, Call(id="call 3", call=LoadAdapter(key="a@1", path="/a"))),
        (worker_protocol.COMMAND, Call(id="call 4", call=UnloadAdapter(key="a@1"))),
        (worker_protocol.WORKER_EVENT, LoadProgress(progress=3, allocated_bytes=4)),
        (worker_protocol.WORKER_EVENT, READY),
        (worker_protocol.WORKER_EVENT, EngineFailed(kind=ErrorKind.ENGINE, message="x")),
        (worker_protocol.WORKER_EVENT, JobReceived(job="a")),
        (worker_protocol.WORKER_EVENT, JobAccepted(job="a")),
        (worker_protocol.WORKER_EVENT, ProbeReply(heartbeat=BEAT, takes_commands=True)),
        (worker_protocol.WORKER_EVENT, CallReply(id="call 1", reply=SNAPSHOT)),
        (worker_protocol.WORKER_EVENT, CallReply(id="call 2", reply=0)),
        (worker_protocol.WORKER_EVENT, CallReply(id="call 3", reply=None)),
        (worker_protocol.WORKER_EVENT, PromptScoresChunk(job="a", scores=scores(2))),
        (
            worker_protocol.WORKER_EVENT,
            Embedded(job="a", vectors=(b"\0\xff\n", b""), error=None, is_last=True),
        ),
        (worker_protocol.WORKER_EVENT, STEP),
    ],
    ids=lambda value: " ".join(
        type(part).__name__
        for part in (value, getattr(value, "call", ""), getattr(value, "reply", ""))
        if part != ""
    ),
)
def test_decoding_reverses_encoding(decoder: Decoder[Any], message: Struct):
    decoded = decoder.decode(encode(message))
    assert decoded == message
    assert repr(decoded) == repr(message), "the types of numbers and collections are the same, too"


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (["Token", "a"], "Invalid value 'Token'"),
        (["JobReceived", 3], "Expected `str`, got `int`"),
        (["JobReceived"], "Expected `array` of at least length 2"),
        ({"type": "JobReceived"}, "Expected `array`"),
        (["StepOutput", [["Token", "a", "b", 1]], []], "Expected `int`, got `str`"),
    ],
)
def test_an_event_of_another_type_is_an_error(message: object, fault: str):
    with pytest.raises(ValidationError, match=fault):
        worker_protocol.WORKER_EVENT.decode(encode(message))
