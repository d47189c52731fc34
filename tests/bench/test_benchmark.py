"""The order of measurements, warm-up, and what a server supports."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from app.bench.benchmark import COMPLETIONS_PATH, BenchConfig, Benchmark, BenchTarget, probe_server
from app.bench.dataset import FixedDataset, RandomDataset, TraceDataset, TraceRow, read_trace
from app.bench.http_client import ServerAddress
from app.bench.load import LoadLevel
from app.core.errors import AppError
from tests.bench.scripted_server import Script, ScriptedExchange, ScriptedServer, answer
from tests.bench.test_client import make_pool
from tests.bench.test_dataset import MESSAGES, write_trace

ONE = (LoadLevel(max_concurrency=1),)


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
    """log: the names of the servers in the order of their streams of the load, without warm-up."""

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
