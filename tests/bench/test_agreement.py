"""`mlxrunner bench` and the independent client in ../shared/bench agree on a recorded stream.

Both get the same bytes at the same recorded times, so the result does not depend on the machine.
"""

import importlib.util
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from app.bench.client import RequestRecord, StreamRecorder
from app.bench.metrics import LoadRecord, MetricOptions, compute_metrics
from tests.bench.scripted_server import DONE, event, finish_event, text_event, usage_event
from tests.conftest import SHARED
from tests.rows import rows

CLIENT = SHARED.parent / "bench" / "bench_client.py"

Stream = list[tuple[float, bytes]]


@pytest.fixture(scope="module")
def other() -> Iterator[ModuleType]:
    """The other client. It needs aiohttp for connections, but not for the metrics."""
    if not CLIENT.is_file():
        pytest.skip("needs ../shared/bench, which is missing")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("aiohttp") is None:
            patch.setitem(sys.modules, "aiohttp", ModuleType("aiohttp"))
        spec = importlib.util.spec_from_file_location("bench_client", CLIENT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def record_stream(seed: int, *, tokens_per_chunk: int) -> Stream:
    """A stream of 64 tokens or more, with random gaps, and bytes that arrive in random pieces."""
    rng = random.Random(seed)
    chunks = 64
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    usage = usage_event(chunks * tokens_per_chunk, prompt=100, cached=rng.randrange(100))
    parts = [role, b": prefill 50/100\n\n", *[text_event("ab ")] * chunks, finish_event()]
    parts += [usage, DONE]
    now, pieces = 1000.0, list[tuple[float, bytes]]()
    for part in parts:
        # the server sends the end of a stream immediately after the last token
        now += rng.uniform(0.0, 0.0001) if part in parts[-3:] else rng.uniform(0.001, 0.2)
        if rng.random() < 0.3:
            cut = rng.randrange(len(part))
            pieces.append((now, part[:cut]))
            now += rng.uniform(0.0, 0.01)
            part = part[cut:]
        pieces.append((now, part))
    return pieces


def measure_ours(stream: Stream, sent: float) -> RequestRecord:
    recorder = StreamRecorder()
    for now, piece in stream:
        recorder.feed(now, piece)
    return recorder.make_record(sent)


def measure_theirs(other: ModuleType, stream: Stream, sent: float) -> Any:
    result = other.Result()
    result.start, result.end = sent, stream[-1][0]
    other._parse_stream(result, stream)
    assert result.error is None
    assert result.done
    return result


@rows("tokens_per_chunk", [1, 3])
@rows("seed", range(20))
def test_both_clients_measure_a_recorded_stream_within_one_percent(
    seed: int, tokens_per_chunk: int, other: ModuleType
) -> None:
    stream, sent = record_stream(seed, tokens_per_chunk=tokens_per_chunk), 999.5
    ours, theirs = measure_ours(stream, sent), measure_theirs(other, stream, sent)
    assert (ours.output_tokens, ours.prompt_tokens, ours.cached_tokens) == (
        theirs.completion_tokens,
        theirs.prompt_tokens,
        theirs.cached_tokens,
    )
    assert ours.finish_reason == theirs.finish_reason
    assert ours.ttft == pytest.approx(theirs.ttft, rel=0.01)
    assert ours.itl == pytest.approx(theirs.gaps, rel=0.01)
    assert ours.tpot is not None
    assert 1 / ours.tpot == pytest.approx(theirs.decode_tps, rel=0.01)
    assert ours.latency == pytest.approx(theirs.total_s, rel=0.01)


def test_both_clients_agree_on_a_load_of_recorded_streams(other: ModuleType) -> None:
    streams = [record_stream(seed, tokens_per_chunk=1) for seed in range(8)]
    sent = [999.0 + 0.1 * index for index in range(8)]
    ours = [measure_ours(stream, start) for stream, start in zip(streams, sent, strict=True)]
    theirs = [
        measure_theirs(other, stream, start) for stream, start in zip(streams, sent, strict=True)
    ]
    # the other client measures from the first request to the end of the last one
    duration = max(result.end for result in theirs) - min(sent)
    load = LoadRecord(requests=ours, duration=duration)
    values = compute_metrics(load, MetricOptions(percentiles=(50, 95)))
    total_tps = sum(result.tokens for result in theirs) / duration
    gaps = [gap for result in theirs for gap in result.gaps]
    assert values["output_throughput"] == pytest.approx(total_tps, rel=0.01)
    for name, data in (("ttft", [result.ttft for result in theirs]), ("itl", gaps)):
        for percent in (50, 95):
            expected = 1000 * other.percentile(data, percent)
            assert values[f"p{percent}_{name}_ms"] == pytest.approx(expected, rel=0.01)
