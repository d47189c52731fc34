"""The order of measurements, warm-up, and what a server supports."""

import asyncio
import contextlib
import math
import statistics
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from app.bench.benchmark import (
    COMPLETIONS_PATH,
    BenchConfig,
    Benchmark,
    BenchTarget,
    LoadGenerator,
    LoadLevel,
    ScheduledSession,
    draw_arrivals,
    probe_server,
)
from app.bench.client import ServerAddress, make_stream_body
from app.bench.dataset import FixedDataset, RandomDataset, TraceDataset, TraceRow, read_trace
from app.core.errors import AppError
from tests.bench.scripted_server import (
    DONE,
    Script,
    ScriptedExchange,
    ScriptedServer,
    answer,
    finish_event,
    text_event,
    usage_event,
)
from tests.bench.test_client import make_pool
from tests.bench.test_dataset import MESSAGES, write_trace

PATH = "/v1/completions"
ALL_AT_ONCE = LoadLevel()

ONE = (LoadLevel(max_concurrency=1),)


def session(*prompts: str, arrival: float | None = None) -> ScheduledSession:
    bodies = tuple(
        make_stream_body({"model": "m", "prompt": prompt, "max_tokens": 1}) for prompt in prompts
    )
    return ScheduledSession(bodies=bodies, arrival=arrival)


class GatedScript:
    """Answers each request after its release. peak: the most requests at the same time."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._released = 0
        self._running = 0
        self.started = 0
        self.peak = 0

    def __call__(self, exchange: ScriptedExchange) -> None:
        with self._condition:
            self.started += 1
            self._running += 1
            self.peak = max(self.peak, self._running)
            self._condition.notify_all()
            assert self._condition.wait_for(lambda: self._released > 0, 30)
            self._released -= 1
            self._running -= 1
        exchange.send_stream([text_event("x"), finish_event(), usage_event(1), DONE])

    def release(self, count: int) -> None:
        with self._condition:
            self._released += count
            self._condition.notify_all()

    def wait_until_started(self, count: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.started >= count, 30)


def test_without_a_rate_all_requests_arrive_at_once() -> None:
    assert draw_arrivals(3, ALL_AT_ONCE, "seed") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_arrivals_have_the_rate_exactly(burstiness: float) -> None:
    level = LoadLevel(request_rate=4.0, burstiness=burstiness)
    arrivals = draw_arrivals(100, level, "seed")
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(25.0)
    assert arrivals == draw_arrivals(100, level, "seed")


def test_a_smaller_burstiness_is_burstier() -> None:
    def spread(burstiness: float) -> float:
        level = LoadLevel(request_rate=10.0, burstiness=burstiness)
        gaps = [b - a for a, b in pairwise(draw_arrivals(2000, level, "seed"))]
        return statistics.pstdev(gaps) / statistics.fmean(gaps)

    assert spread(0.25) == pytest.approx(2.0, rel=0.1)
    assert spread(1.0) == pytest.approx(1.0, rel=0.1)
    assert spread(16.0) == pytest.approx(0.25, rel=0.1)
    assert spread(math.inf) == pytest.approx(0.0, abs=1e-9)


def test_levels_have_labels() -> None:
    level = LoadLevel(max_concurrency=8)
    assert level.label == "8"
    assert replace(level, request_rate=2.5).label == "8 at 2.5/s"
    assert LoadLevel(request_rate=2.0).label == "2/s"
    assert LoadLevel().label == "all"


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (3, 3), (None, 7)])
def test_the_concurrency_is_limited_and_used(limit: int | None, expected: int) -> None:
    script = GatedScript()

    async def run(url: str) -> LoadGenerator:
        sessions = [session(f"p{i}") for i in range(7)]
        level = LoadLevel(max_concurrency=limit)
        load = LoadGenerator(make_pool(url), PATH, sessions, level)
        running = asyncio.create_task(load.run())
        await asyncio.to_thread(script.wait_until_started, expected)
        script.release(7)
        await running
        return load

    with ScriptedServer(script).run() as server:
        record = asyncio.run(run(server.url)).make_load_record()
    assert len(record.requests) == 7
    assert all(request.error is None for request in record.requests)
    assert record.duration >= max(request.latency for request in record.requests)
    assert (script.peak, record.cancelled) == (expected, 0)


def test_the_turns_of_a_session_run_one_after_the_other() -> None:
    script = GatedScript()
    script.release(5)
    with ScriptedServer(script).run() as server:
        sessions = [session("a", "b", "c", "d", "e")]
        load = LoadGenerator(make_pool(server.url), PATH, sessions, ALL_AT_ONCE)
        asyncio.run(load.run())
        assert server.list_prompts() == ["a", "b", "c", "d", "e"]
    assert script.peak == 1


def test_recorded_times_are_kept_unless_there_is_a_rate() -> None:
    script = GatedScript()
    script.release(8)
    sessions = [session("late", arrival=0.2), session("early", arrival=0.0)]
    fixed = LoadLevel(request_rate=1000.0, max_concurrency=1, burstiness=math.inf)
    with ScriptedServer(script).run() as server:
        replay = LoadGenerator(make_pool(server.url), PATH, sessions, ALL_AT_ONCE)
        asyncio.run(replay.run())
        assert server.list_prompts() == ["early", "late"]
        # it ends after the late request, which is sent after 0.2 s
        assert replay.make_load_record().duration >= 0.2
        asyncio.run(LoadGenerator(make_pool(server.url), PATH, sessions, fixed).run())
        assert server.list_prompts()[2:] == ["late", "early"]


def test_a_cancelled_load_keeps_the_results_so_far() -> None:
    script = GatedScript()

    async def run(url: str) -> LoadGenerator:
        sessions = [session(f"p{i}") for i in range(6)]
        level = LoadLevel(max_concurrency=2)
        load = LoadGenerator(make_pool(url), PATH, sessions, level)
        running = asyncio.create_task(load.run())
        script.release(2)
        # two have ended, so that two others could start
        await asyncio.to_thread(script.wait_until_started, 4)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return load

    with ScriptedServer(script).run() as server:
        record = asyncio.run(run(server.url)).make_load_record()
        script.release(4)
    assert len(record.requests) == 2
    assert record.cancelled == 2


def test_the_client_measures_its_own_cost() -> None:
    script = GatedScript()

    async def run(url: str) -> LoadGenerator:
        load = LoadGenerator(make_pool(url), PATH, [session("p")], ALL_AT_ONCE)
        running = asyncio.create_task(load.run())
        await asyncio.to_thread(script.wait_until_started, 1)
        await asyncio.sleep(0.1)
        script.release(1)
        await running
        return load

    with ScriptedServer(script).run() as server:
        record = asyncio.run(run(server.url)).make_load_record()
    assert record.cpu_seconds > 0
    assert record.lag
    assert min(record.lag) > -0.01


def run(
    config: BenchConfig, *servers: ScriptedServer, models: tuple[str | None, ...] = (None, None)
) -> Benchmark:
    addresses = [ServerAddress.parse(server.url) for server in servers]
    pairs = list(zip(addresses, models, strict=False))
    benchmark = Benchmark(config, pairs, lambda target, level, load: None)
    asyncio.run(benchmark.run())
    return benchmark


def probe(script: Script, config: BenchConfig, model: str | None = None) -> BenchTarget:
    with ScriptedServer(script).run() as server:
        return asyncio.run(probe_server(make_pool(server.url), model, config))


@contextlib.contextmanager
def two_servers(log: list[str]) -> Iterator[tuple[ScriptedServer, ScriptedServer]]:
    """log: the names of the servers in the order of their streams under load, without warm-up."""

    def name(word: str) -> Script:
        def script(exchange: ScriptedExchange) -> None:
            if exchange.body.get("stream") and exchange.body["max_tokens"] == 9:
                log.append(word)
            answer(exchange)

        return script

    with ScriptedServer(name("a")).run() as a, ScriptedServer(name("b")).run() as b:
        yield a, b


def test_the_model_and_the_length_of_words_come_from_the_server() -> None:
    target = probe(answer, BenchConfig())
    assert target.model == "scripted"
    assert target.length.tokens_per_word == 1.0
    assert target.length.template_tokens == 2.0
    assert target.ignore_eos
    assert probe(answer, BenchConfig(path=COMPLETIONS_PATH), "other").model == "other"


def reject_ignore_eos(exchange: ScriptedExchange) -> None:
    if "ignore_eos" in exchange.body:
        exchange.send_json({"error": {"message": "unknown field ignore_eos"}}, status=400)
    else:
        answer(exchange)


def test_ignore_eos_is_left_out_if_the_server_rejects_it() -> None:
    assert not probe(reject_ignore_eos, BenchConfig()).ignore_eos
    assert not probe(answer, BenchConfig(ignore_eos=False)).ignore_eos
    with pytest.raises(AppError, match="http_400: unknown field ignore_eos"):
        probe(reject_ignore_eos, BenchConfig(ignore_eos=True))


def test_a_server_that_counts_no_tokens_gets_a_word_per_token() -> None:
    def script(exchange: ScriptedExchange) -> None:
        exchange.send_json({"choices": []})

    assert probe(script, BenchConfig(), "m").length.count_words(50) == 50


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {"error": {"message": "no"}}, "requires an API key: set MLXRUNNER_API_KEY"),
        (404, {"error": {"message": "no model m"}}, "http_404: no model m"),
        (500, {}, "http_500"),
        (200, [], "invalid_response: the response is not a JSON object"),
    ],
)
def test_a_server_that_rejects_requests_is_an_error(status: int, body: Any, message: str) -> None:
    with pytest.raises(AppError, match=message):
        probe(lambda exchange: exchange.send_json(body, status=status), BenchConfig(), "m")


def test_a_missing_server_and_a_server_without_models_are_errors() -> None:
    with pytest.raises(AppError, match="lists no model: name one with --model"):
        probe(lambda exchange: exchange.send_json({"data": []}), BenchConfig())
    with ScriptedServer(answer).run() as server:
        pool = make_pool(server.url)
    with pytest.raises(AppError, match="start one with `mlxrunner serve`"):
        asyncio.run(probe_server(pool, None, BenchConfig()))


def test_each_level_has_its_requests_after_the_warm_up() -> None:
    levels = (LoadLevel(max_concurrency=1), LoadLevel(max_concurrency=6))
    with ScriptedServer(answer).run() as server:
        [result] = run(BenchConfig(levels=levels), server).results
    counts = [len(load.requests) for loads in result.loads.values() for load in loads]
    assert counts == [16, 24]
    streams = [request.body for request in server.requests if request.body.get("stream")]
    assert [body["max_tokens"] for body in streams].count(8) == 6
    assert len(streams) == 6 + 16 + 24
    # no prompt twice: a prefix cache does not help
    assert len(set(server.list_prompts())) == len(streams)


def test_a_request_has_the_configured_fields() -> None:
    config = BenchConfig(
        levels=ONE, num_prompts=1, num_warmups=0, output_len=5, extra_body={"top_p": 0.9}
    )
    with ScriptedServer(answer).run() as server:
        run(config, server)
    body = server.requests[-1].body
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (5, 0.0, 0.9)
    assert body["ignore_eos"] is True


def test_the_warm_up_caches_a_shared_prefix() -> None:
    dataset = RandomDataset(input_len=20, prefix_len=30)
    config = BenchConfig(dataset=dataset, levels=ONE, num_prompts=2, num_warmups=1)
    with ScriptedServer(answer).run() as server:
        run(config, server)
    assert len({tuple(prompt.split()[:30]) for prompt in server.list_prompts()}) == 1
    assert len({tuple(prompt.split()) for prompt in server.list_prompts()}) == 3


def test_two_servers_alternate_and_get_the_same_prompts() -> None:
    log: list[str] = []
    config = BenchConfig(levels=ONE, num_prompts=2, rounds=3, num_warmups=1, output_len=9)
    with two_servers(log) as (a, b):
        first, second = run(config, a, b).results
    assert log == [*"aabb", *"bbaa", *"aabb"]
    assert a.list_prompts() == b.list_prompts()
    assert len(set(a.list_prompts())) == 7
    assert [len(loads) for loads in (first.loads[ONE[0]], second.loads[ONE[0]])] == [3, 3]


def test_a_server_compared_with_itself_gets_each_prompt_once() -> None:
    config = BenchConfig(levels=ONE, num_prompts=2, rounds=2, num_warmups=0)
    with ScriptedServer(answer).run() as server:
        run(config, server, server)
    assert len(set(server.list_prompts())) == len(server.list_prompts()) == 8


def test_a_trace_runs_once_or_for_the_number_of_requests() -> None:
    rows = tuple(TraceRow(input_length=20) for _ in range(5))
    config = BenchConfig(dataset=TraceDataset(rows=rows), levels=ONE, num_warmups=1)
    with ScriptedServer(answer).run() as server:
        [result] = run(config, server).results
        assert len(result.loads[ONE[0]][0].requests) == 5
        config = BenchConfig(
            dataset=TraceDataset(rows=rows), levels=ONE, num_warmups=0, num_prompts=3
        )
        [result] = run(config, server).results
        assert len(result.loads[ONE[0]][0].requests) == 3


def test_the_number_of_requests_can_end_within_a_conversation(tmp_path: Any) -> None:
    rows = read_trace(write_trace(tmp_path, {"messages": MESSAGES}, {"messages": MESSAGES}))
    config = BenchConfig(dataset=TraceDataset(rows=rows), levels=ONE, num_warmups=0, num_prompts=4)
    with ScriptedServer(answer).run() as server:
        run(config, server)
    assert server.list_prompts() == ["u1", "u2", "t", "u1"]


def test_messages_need_the_endpoint_of_chats(tmp_path: Any) -> None:
    rows = read_trace(write_trace(tmp_path, {"messages": MESSAGES}))
    config = BenchConfig(path=COMPLETIONS_PATH, dataset=TraceDataset(rows=rows), levels=ONE)
    with (
        ScriptedServer(answer).run() as server,
        pytest.raises(AppError, match="use --endpoint /v1/chat/completions"),
    ):
        run(config, server)


def test_fixed_prompts_are_sent_unchanged() -> None:
    config = BenchConfig(
        dataset=FixedDataset(texts=("a", "b")),
        path=COMPLETIONS_PATH,
        levels=ONE,
        num_prompts=3,
        num_warmups=0,
    )
    with ScriptedServer(answer).run() as server:
        run(config, server)
    assert server.list_prompts() == ["a", "b", "a"]


def test_a_server_that_fails_in_the_warm_up_is_an_error() -> None:
    def script(exchange: ScriptedExchange) -> None:
        if exchange.body.get("stream"):
            exchange.send_json({"error": {"message": "no streams"}}, status=400)
        else:
            answer(exchange)

    with (
        ScriptedServer(script).run() as server,
        pytest.raises(AppError, match="http_400: no streams"),
    ):
        run(BenchConfig(levels=ONE), server)
