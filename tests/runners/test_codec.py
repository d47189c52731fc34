"""The codec of messages between the server and a model process."""

import dataclasses
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.embeddings import EmbedJob, EmbedResult
from app.core.errors import ErrorKind
from app.core.jobs import (
    Ended,
    EngineFailed,
    EngineReady,
    EngineStats,
    Heartbeat,
    Job,
    LoadProgress,
    PromptLogprobs,
    Started,
    StepOutput,
    Token,
)
from app.core.model_files import ModelFiles
from app.core.requests import LarkGrammar
from app.core.settings import ModelSettings, Settings
from app.runners import worker_protocol
from app.runners.codec import Codec

# values of a model's JSON files
json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)

# any bytes except zero, which no path contains; also some that are not UTF-8
paths = st.binary(min_size=1, max_size=9).map(
    lambda raw: Path(raw.replace(b"\0", b"/").decode("utf-8", "surrogateescape"))
)

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=9),
    int: st.integers(-(2**63), 2**63 - 1),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    bytes: st.binary(max_size=9),
    Path: paths,
    type(None): st.none(),
    Any: json,
}


@cache  # building a strategy takes longer than drawing from it
def make_strategy(kind: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """A strategy for all values of an annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is Mapping:
        return st.dictionaries(st.text(max_size=5), json, max_size=3)
    if origin in (Union, types.UnionType):
        # a class may contain another of its kind, up to a depth
        ends = depth > 2 and type(None) in arguments
        shallow = [a for a in arguments if not (ends and is_dataclass(a))]
        return st.one_of([make_strategy(a, depth) for a in shallow])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(make_strategy(arguments[0], depth), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(make_strategy(a, depth) for a in arguments))
    if origin is frozenset:
        return st.frozensets(make_strategy(arguments[0], depth), max_size=3)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    assert is_dataclass(kind), kind
    hints = get_type_hints(kind)
    inside = {field.name: make_strategy(hints[field.name], depth + 1) for field in fields(kind)}
    return st.fixed_dictionaries(inside).map(lambda values: build(kind, values))


_EXCLUSIVE = {"models", "installed", "runner", "max_loaded", "context_shift", "multi_user", "cache"}
# the names of defaults must be different
_EXCLUSIVE |= {"tls_cert", "tls_key", "defaults"}


def build(kind: Any, values: dict[str, Any]) -> Any:
    """Build a value, without settings that exclude each other."""
    if kind is Settings:
        free = set(values) - _EXCLUSIVE
        values = {name: values[name] for name in free}
    return kind(**values)


CODECS = {
    "init": (worker_protocol.WORKER_INIT, worker_protocol.WorkerInit),
    "a job": (worker_protocol.JOB, Job),
    "inputs to embed": (worker_protocol.EMBED_JOB, EmbedJob),
    "an event": (worker_protocol.WORKER_EVENT, worker_protocol.WorkerEvent),
    "a status": (worker_protocol.WORKER_STATUS, worker_protocol.WorkerStatus),
    "an error": (worker_protocol.ERROR_BODY, worker_protocol.ErrorBody),
    "a thread message": (
        Codec[Any](LoadProgress | EngineReady | EngineFailed | StepOutput),
        EngineReady | EngineFailed | StepOutput,
    ),
    "settings": (Codec[Settings](Settings), Settings),
    "a model's settings": (Codec[ModelSettings](ModelSettings), ModelSettings),
    "files": (Codec[ModelFiles](ModelFiles), ModelFiles),
}


def describe(value: object) -> object:
    """The value as text, with its types. The repr of a frozenset depends on how it was built."""
    if isinstance(value, frozenset):
        return "frozenset", sorted(map(repr, value))
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value), [describe(getattr(value, field.name)) for field in fields]
    if isinstance(value, tuple):
        return tuple, [describe(item) for item in value]
    return repr(value)


@pytest.mark.parametrize(("codec", "kind"), CODECS.values(), ids=CODECS)
@given(data=st.data())
def test_decoding_reverses_encoding(codec: Codec[Any], kind: Any, data: st.DataObject):
    value = data.draw(make_strategy(kind))
    line = codec.encode(value)
    assert b"\n" not in line
    back = codec.decode(line)
    assert back == value
    # equal numbers of other types, and lists and tuples, are distinguished too
    assert describe(back) == describe(value)


def test_logprobs_may_be_infinite():
    """Ids that a model masks have a logprob of minus infinity, which JSON cannot express."""
    token = Token(
        job_id="a",
        id=1,
        timestamp_ns=2,
        logprob=-math.inf,
        top_logprobs=((3, -math.inf), (4, -0.1)),
    )
    assert worker_protocol.WORKER_EVENT.decode(
        worker_protocol.WORKER_EVENT.encode(_step(token))
    ) == _step(token)
    scores = PromptLogprobs(job_id="a", logprobs=((-math.inf, ((1, math.inf),)),))
    assert worker_protocol.WORKER_EVENT.decode(
        worker_protocol.WORKER_EVENT.encode(_step(scores))
    ) == _step(scores)


def _step(update: Any) -> StepOutput:
    return StepOutput(updates=(update,), stats=EngineStats())


def test_keep_alive_may_be_infinite():
    settings = Settings(models=(ModelSettings(name="m", keep_alive=math.inf),), keep_alive=math.inf)
    codec = Codec[Settings](Settings)
    assert codec.decode(codec.encode(settings)) == settings


def test_a_grammar_may_contain_another():
    grammar = LarkGrammar(text="a", inner=LarkGrammar(text="b", inner=LarkGrammar(text="c")))
    codec = Codec[LarkGrammar](LarkGrammar)
    assert codec.decode(codec.encode(grammar)) == grammar


def test_union_members_are_distinguished_by_name():
    ended = Ended(job_id="a", reason="stop", timestamp_ns=1)
    assert b'"is":"Ended"' in worker_protocol.WORKER_EVENT.encode(_step(ended))
    assert (
        worker_protocol.WORKER_EVENT.decode(
            worker_protocol.WORKER_EVENT.encode(
                _step(Started(job_id="a", cached_tokens=0, timestamp_ns=1))
            )
        )
        != ended
    )
    beat = Heartbeat(timestamp_ns=1, stage="decode, batch size 8")
    assert worker_protocol.WORKER_EVENT.decode(worker_protocol.WORKER_EVENT.encode(beat)) == beat
    failed = EngineFailed(kind=ErrorKind.ENGINE, message="x", is_internal_error=True)
    assert (
        worker_protocol.WORKER_EVENT.decode(worker_protocol.WORKER_EVENT.encode(failed)) == failed
    )


@dataclass
class _Ambiguous:
    value: bytes | str


@dataclass
class _Unsupported:
    value: set[int]


@pytest.mark.parametrize("kind", [_Ambiguous, _Unsupported, complex])
def test_unsupported_types_are_rejected_by_the_constructor(kind: type):
    with pytest.raises(TypeError):
        Codec[Any](kind)


def test_vectors_are_exact_bytes():
    codec = Codec[EmbedResult](EmbedResult)
    embedded = EmbedResult(job_id="a", vectors=(b"\x00\xff\n" * 100, b""))
    assert codec.decode(codec.encode(embedded)) == embedded
