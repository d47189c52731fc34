"""A real server under load, as an operator sees it: rejections, metrics, limits."""

import asyncio
import json
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server_process import TIMEOUT, ServerProcess, run_server
from tests.throttle import Throttle
from tests.waiting import wait_until


def scrape(server: ServerProcess) -> dict[tuple[str, ...], float]:
    """The samples of the model by name, without the prefixes of vLLM and mlxrunner, and by the
    values of its other labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=TIMEOUT).text
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("model_name", "tiny") == "tiny":
                labels.pop("engine", None)
                name = sample.name.removeprefix("mlxrunner_").removeprefix("vllm:")
                found[name, *labels.values()] = sample.value
    return found


async def send_concurrently(server: ServerProcess, count: int, **body: Any) -> list[httpx.Response]:
    """Send so many completions concurrently."""
    fields = {"model": "tiny", "temperature": 0, **body}
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        requests = (
            client.post(f"{server.url}/v1/completions", json={**fields, "prompt": f"number {n}"})
            for n in range(count)
        )
        return await asyncio.gather(*requests)


def test_concurrent_requests_are_answered_rejected_and_counted(
    tiny_model: Path, throttle: Throttle
) -> None:
    """The engine is slow until all requests have arrived, so that the queue is full."""
    arguments = (str(tiny_model), "--parallel", "2", "--max-queue", "3")
    with run_server(*arguments, environ=throttle.on().variables) as server:
        with ThreadPoolExecutor(1) as pool:
            body = {"max_tokens": 100, "logit_bias": {"257": -100}}
            future = pool.submit(lambda: asyncio.run(send_concurrently(server, 20, **body)))
            wait_until(lambda: server.status()["Rejected"] == 15)
            throttle.off()
            replies = future.result()
        statuses = Counter(reply.status_code for reply in replies)
        assert statuses == {200: 5, 429: 15}
        for reply in replies:
            if reply.status_code == 429:
                assert 1 <= int(reply.headers["retry-after"]) <= 60
                assert reply.json()["error"]["code"] == "server_busy"
        metrics, status = scrape(server), server.status()
        assert metrics["request_success_total", "length"] == statuses[200]
        assert metrics["request_errors_total", "server_busy"] == statuses[429] == status["Rejected"]
        assert metrics["time_to_first_token_seconds_count",] == statuses[200]
        assert metrics["inter_token_latency_seconds_count",] == 99 * statuses[200]
        assert metrics["generation_tokens_total",] == 100 * statuses[200]


def test_metrics_and_status_agree_and_add_up(tiny_model: Path) -> None:
    with run_server(str(tiny_model), "--parallel", "4", "--context", "256") as server:
        replies = [
            *asyncio.run(send_concurrently(server, 8, max_tokens=8)),
            *asyncio.run(send_concurrently(server, 8, max_tokens=8)),
            *asyncio.run(send_concurrently(server, 1, max_tokens=8, cache_prompt=False)),
        ]
        assert {reply.status_code for reply in replies} == {200}
        metrics, status = scrape(server), server.status()
        ledger: Any = status["Ledger"]
        tokens: Any = status["Tokens"]
        hits: Any = status["Hits"]
        misses: Any = status["Misses"]
        lines = {name: ledger[name] for name in ("weights", "kv", "prefix", "working", "free")}
        assert {name: metrics["memory_bytes", name] for name in lines} == lines
        assert sum(lines.values()) == ledger["budget"] == metrics["memory_budget_bytes",]
        assert min(lines.values()) >= 0
        assert (status["Running"], status["Waiting"], ledger["kv"]) == (0, 0, 0)
        assert tokens["cached"] + tokens["prefilled"] == 17 * len("number 0")
        assert metrics["prompt_tokens_total",] == metrics["prefix_cache_queries_total",]
        assert metrics["prefix_cache_hits_total",] == tokens["cached"] > 0
        assert sum(hits.values()) == metrics["prefix_cache_hit_tokens_count",] == 17
        assert {name: metrics["prefix_cache_misses_total", name] for name in misses} == misses
        assert misses["unwanted"] == 1
        assert status["ContextLength"] == metrics["max_model_len",] == 256


def test_counters_continue_after_a_runner_is_replaced(tiny_model: Path) -> None:
    def read_counters() -> dict[tuple[str, ...], float]:
        metrics = scrape(server)
        return {key: metrics[key] for key in metrics if key[0].endswith("_tokens_total")}

    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8}
    with run_server(str(tiny_model)) as server:
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT)
        before = read_counters()
        status: Any = server.status()
        [model] = status["Models"]
        os.kill(model["Pid"], signal.SIGKILL)
        # a streamed request waits until the model is loaded again
        reply = None
        while reply is None or reply.status_code != 200:
            reply = httpx.post(
                f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=TIMEOUT
            )
        after = read_counters()
        assert after["generation_tokens_total",] >= before["generation_tokens_total",] + 1
        assert all(after[key] >= before[key] for key in before)
        assert scrape(server)["model_restarts_total",] == 1


def test_the_json_log_has_the_request_id(tiny_model: Path) -> None:
    with run_server(str(tiny_model), "--log-format", "json") as server:
        reply = httpx.post(
            f"{server.url}/v1/completions?key=secret",
            json={"model": "tiny", "prompt": "nobody may read this", "max_tokens": 4},
            headers={"x-request-id": "mine", "authorization": "Bearer secret"},
            timeout=TIMEOUT,
        )
        assert reply.status_code == 200
        server.stop()
        lines = [json.loads(line) for line in server.log]
    [line] = [line for line in lines if line["logger"] == "app.access"]
    assert line["request_id"] == "mine"
    assert (line["status"], line["path"]) == (200, "/v1/completions")
    assert (line["model"], line["completion_tokens"]) == ("tiny", 4)
    assert not [found for found in server.log if "secret" in found or "nobody" in found]


def test_the_configured_context_is_used(tiny_model: Path) -> None:
    with run_server(str(tiny_model), "--context", "64") as server:
        body = {"model": "tiny", "prompt": "x" * 64}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT)
        assert reply.status_code == 400
        assert "the server's context is 64 tokens" in reply.json()["error"]["message"]
        models = httpx.get(f"{server.url}/v1/models", timeout=TIMEOUT).json()["data"]
        assert [model["context_length"] for model in models] == [64]


def test_generation_continues_with_context_shift(tiny_model: Path) -> None:
    options = ("--context", "64", "--context-shift", "--cache", "slots", "--parallel", "1")
    with run_server(str(tiny_model), *options) as server:
        body = {
            "model": "tiny",
            "prompt": "x" * 100,
            "max_tokens": 150,
            "temperature": 0,
            "logit_bias": {"257": -100},
        }
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 150
        assert reply.json()["usage"]["prompt_tokens"] == 63


def test_debug_logs_where_a_prompt_diverges_from_the_cache(tiny_model: Path) -> None:
    body = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    with run_server(str(tiny_model), "--debug") as server:
        for prompt in ("once upon a time", "once upon a hill"):
            url = f"{server.url}/v1/completions"
            httpx.post(url, json={**body, "prompt": prompt}, timeout=TIMEOUT)
        # the server is killed at the end, and may respond before it writes its log
        wait_until(lambda: "the cached prefix with 'time" in server.log_text())
    assert "12 of 16 prompt tokens were cached (diverged at 12)" in server.log_text()
    expected = "after ' upon a ' the prompt continues with 'hill', and the cached prefix with 'time"
    assert expected in server.log_text()
    with run_server(str(tiny_model)) as quiet:
        url = f"{quiet.url}/v1/completions"
        httpx.post(url, json={**body, "prompt": "once upon a time"}, timeout=TIMEOUT)
    assert "upon" not in quiet.log_text()


def test_too_little_memory_is_a_startup_error(tiny_model: Path) -> None:
    server = ServerProcess([str(tiny_model), "--memory", "0.0001"])
    assert server.process.wait(TIMEOUT) == 1
    server.stop()
    assert "mlxrunner: " in server.log_text()
    assert "Traceback" not in server.log_text()
