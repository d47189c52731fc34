"""/metrics: correct counts, equal to those of /v1/status."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.core.errors import AppError, ErrorKind
from app.core.events import ModelLoading, PrefillProgress
from app.core.jobs import EngineStats
from app.core.models import ModelState
from app.core.ports import RunnerStatus
from app.core.settings import Settings
from app.core.usage import ConnectionStats
from tests.api.asgi import Conversation
from tests.fakes import (
    CARD,
    FOREVER,
    HELLO,
    STATS,
    FakeGenerate,
    Pause,
    Script,
    build_fake_app,
    finish,
    text,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

CHAT: Any = {"model": CARD.id, "messages": [{"role": "user", "content": "hi"}]}
LINES: Any = {"prompt": "hi", "options": {}}


def parse_exposition(exposition: str) -> Samples:
    """Every sample by its name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


@dataclass
class Scraped:
    """The samples of a scrape; without labels, those of the model that the fakes serve."""

    samples: Samples

    def __call__(self, name: str, **labels: str) -> float:
        all_labels = {"model_name": CARD.id, "engine": "0", **labels}
        found = self.samples.get((name, tuple(sorted(all_labels.items()))))
        return self.samples[name, tuple(sorted(labels.items()))] if found is None else found

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The nonzero samples of a family by one of their labels."""
        return {
            dict(labels)[label]: value
            for (sample, labels), value in self.samples.items()
            if sample == name and value
        }

    def finished_reasons(self) -> dict[str, float]:
        return self.by_label("vllm:request_success_total", "finished_reason")

    def errors(self) -> dict[str, float]:
        return self.by_label("mlxrunner_request_errors_total", "reason")


async def get(app: Any, path: str) -> Any:
    return await Conversation(app, "GET", path).end()


def scrape(call: Any) -> Scraped:
    reply = call("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scraped(parse_exposition(reply.body.decode()))


def scrape_after(
    generate: FakeGenerate,
    path: str,
    body: Any,
    act: Callable[[Conversation], Coroutine[Any, Any, None]] | None = None,
) -> Scraped:
    """The metrics after one request to a separate application."""

    async def run() -> Scraped:
        app = build_fake_app(generate, Settings())
        conversation = Conversation(app, "POST", path, json.dumps(body).encode())
        if act is not None:
            await act(conversation)
        await conversation.end()
        return Scraped(parse_exposition((await get(app, "/metrics")).body.decode()))

    return asyncio.run(run())


def test_engine_metrics_equal_the_status(call: Any):
    metrics, status = scrape(call), call("GET", "/v1/status").json
    tokens = status["Tokens"]
    assert metrics("vllm:num_requests_running") == status["Running"]
    assert metrics("vllm:num_requests_waiting") == status["Waiting"]
    assert metrics("mlxrunner_num_requests_preparing") == status["Preparing"]
    assert metrics("mlxrunner_num_requests_compiling") == status["Compiling"]
    assert metrics("mlxrunner_max_num_seqs") == status["Parallel"]
    assert metrics("mlxrunner_max_model_len") == status["ContextLength"]
    assert metrics("vllm:prompt_tokens_total") == tokens["cached"] + tokens["prefilled"]
    assert metrics("vllm:generation_tokens_total") == tokens["generated"]
    assert metrics("vllm:prefix_cache_hits_total") == tokens["cached"]
    assert metrics("vllm:prefix_cache_queries_total") == STATS.prefix_query_tokens
    assert metrics("vllm:num_preemptions_total") == status["Preemptions"]
    assert metrics("mlxrunner_prefix_cache_evictions_total") == status["Evictions"]
    assert metrics("mlxrunner_engine_failures_total") == status["Failures"]
    assert metrics("mlxrunner_engine_steps_total") == status["Steps"]
    assert metrics("mlxrunner_allocator_bytes") == status["Memory"]
    for reason, count in status["Misses"].items():
        assert metrics("mlxrunner_prefix_cache_misses_total", reason=reason) == count


def test_the_ledger_adds_up_to_the_budget(call: Any):
    metrics, ledger = scrape(call), call("GET", "/v1/status").json["Ledger"]
    lines = {line: bytes_ for line, bytes_ in ledger.items() if line != "budget"}
    assert {line: metrics("mlxrunner_memory_bytes", line=line) for line in lines} == lines
    assert metrics("mlxrunner_memory_budget_bytes") == ledger["budget"] == sum(lines.values())


def test_kv_cache_usage_is_that_of_running_requests(call: Any, generate: FakeGenerate):
    """Cached prefixes of finished requests count as free, as in vLLM."""
    assert scrape(call)("vllm:kv_cache_usage_perc") == pytest.approx(250 / (250 + 100 + 200))
    generate.runner_status = RunnerStatus(state="loading", progress=0, stats=EngineStats())
    assert scrape(call)("vllm:kv_cache_usage_perc") == 0


def test_prefix_hits_are_a_histogram_of_cached_lengths(call: Any):
    metrics, hits = scrape(call), call("GET", "/v1/status").json["Hits"]
    name = "mlxrunner_prefix_cache_hit_tokens"
    assert metrics(f"{name}_bucket", le="0.0") == hits["0"]
    assert metrics(f"{name}_bucket", le="64.0") == 5
    assert metrics(f"{name}_bucket", le="65536.0") == 7
    assert metrics(f"{name}_bucket", le="+Inf") == sum(hits.values())
    assert metrics(f"{name}_count") == sum(hits.values())
    assert metrics(f"{name}_sum") == 700


@pytest.mark.parametrize("state", ["loading", "ready", "stalled", "failed"])
def test_exactly_one_state_is_set(call: Any, generate: FakeGenerate, state: Any):
    generate.runner_status = RunnerStatus(state=state, progress=0, stats=EngineStats())
    metrics = scrape(call)
    assert metrics.by_label("mlxrunner_state", "state") == {state: 1}
    assert metrics.by_label("mlxrunner_model_state", "state") == {state: 1}


def test_an_unloaded_model_has_no_capacity_metrics(
    call: Any, generate: FakeGenerate, monkeypatch: pytest.MonkeyPatch
):
    on_disk = ModelState(name=CARD.id, phase="unloaded")
    monkeypatch.setattr(generate, "list_model_states", lambda: [on_disk])
    metrics = scrape(call)
    names = {name for name, _ in metrics.samples}
    assert not names & {f"mlxrunner_{n}" for n in ("max_num_seqs", "max_model_len")}
    assert "mlxrunner_model_share_bytes" not in names
    assert metrics.by_label("mlxrunner_model_state", "state") == {"unloaded": 1}


def test_metrics_are_labelled_by_model():
    generate = FakeGenerate(HELLO, cards=(CARD, replace(CARD, id="other")))
    metrics = scrape_after(generate, "/v1/chat/completions", {**CHAT, "model": "other"})
    name = "vllm:time_to_first_token_seconds_count"
    assert metrics(name) == 0
    assert metrics(name, model_name="other") == 1
    assert metrics("vllm:num_requests_running", model_name="other") == STATS.running


def test_unknown_model_names_are_no_labels():
    for path, body in (
        ("/v1/embeddings", {"model": "made up", "input": "x"}),
        ("/v1/chat/completions", {**CHAT, "model": "made up"}),
    ):
        metrics = scrape_after(FakeGenerate(), path, body)
        assert {dict(labels).get("model_name") for _, labels in metrics.samples} == {CARD.id, None}


@pytest.mark.parametrize("model", ["m", "m:latest"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/embeddings", {"input": "x"})],
)
def test_a_model_has_one_label_under_both_of_its_names(path: str, body: Any, model: str):
    generate = FakeGenerate(
        open_error=AppError(ErrorKind.BUSY, "no"), cards=(replace(CARD, id="m"),)
    )
    metrics = scrape_after(generate, path, {**body, "model": model})
    assert metrics.by_label("mlxrunner_request_errors_total", "model_name") == {"m": 1}
    assert {
        name for _, labels in metrics.samples for key, name in labels if key == "model_name"
    } == {"m"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_request_is_counted_by_its_finish_reason(stream: bool, reason: Any):
    generate = FakeGenerate([text("a"), finish(reason)])
    metrics = scrape_after(generate, "/v1/chat/completions", {**CHAT, "stream": stream})
    assert metrics.finished_reasons() == {reason: 1}
    assert metrics.errors() == {}
    assert metrics("vllm:request_success_total", finished_reason="error") == 0


def test_a_tool_call_is_counted_as_stop_like_in_vllm():
    metrics = scrape_after(FakeGenerate([finish("tool_calls")]), "/v1/chat/completions", CHAT)
    assert metrics.finished_reasons() == {"stop": 1}


def test_every_choice_is_counted_and_the_request_once():
    metrics = scrape_after(
        FakeGenerate(), "/v1/chat/completions", {**CHAT, "n": 3, "max_tokens": 9}
    )
    assert metrics.finished_reasons() == {"stop": 3}
    assert metrics("vllm:e2e_request_latency_seconds_count") == 3
    assert metrics("vllm:time_to_first_token_seconds_count") == 3
    assert metrics("vllm:request_params_n_sum") == 3
    assert metrics("vllm:request_params_n_count") == 1
    assert metrics("vllm:request_params_max_tokens_sum") == 9
    assert metrics("vllm:request_generation_tokens_sum") == 6
    assert metrics("vllm:request_prompt_tokens_sum") == 21
    assert metrics("vllm:request_prefill_kv_computed_tokens_sum") == 12


def test_latencies_are_measured_per_phase():
    """Two milliseconds of prefill and thirty of decoding, thirty-five in total."""
    slow: Script = [
        Pause(0.03),
        PrefillProgress(computed_tokens=1, total_tokens=9),
        PrefillProgress(computed_tokens=9, total_tokens=9),
        Pause(0.06),
        text("a"),
        text("b"),
        finish(tokens=4),
    ]
    metrics = scrape_after(FakeGenerate(slow), "/v1/chat/completions", {**CHAT, "stream": True})
    assert metrics("vllm:time_to_first_token_seconds_count") == 1
    assert metrics("vllm:time_to_first_token_seconds_sum") >= 0.09
    assert metrics("vllm:e2e_request_latency_seconds_sum") >= 0.09
    phases = {
        name: metrics(f"vllm:request_{name}_time_seconds_sum")
        for name in ("queue", "prefill", "decode", "inference")
    }
    assert phases == pytest.approx(
        {"queue": 0.003, "prefill": 0.002, "decode": 0.030, "inference": 0.032}
    )
    per_token = "vllm:request_time_per_output_token_seconds"
    # thirty milliseconds between the first of four tokens and the last
    assert metrics(f"{per_token}_sum") == pytest.approx(0.01)
    assert metrics(f"{per_token}_bucket", le="0.008") == 0
    assert metrics(f"{per_token}_bucket", le="0.01") == 1


def test_one_token_has_no_time_between_tokens():
    metrics = scrape_after(FakeGenerate([text("a"), finish(tokens=1)]), "/completion", LINES)
    assert metrics("vllm:request_time_per_output_token_seconds_count") == 0
    assert metrics("vllm:inter_token_latency_seconds_count") == 0


def test_inter_token_latency_is_measured_in_the_engine():
    """Not when a client reads the tokens."""
    end = finish(tokens=4)
    gaps = replace(end.timings, inter_token_ns=(1_000_000, 5_000_000, 90_000_000_000))
    generate = FakeGenerate([text("abcd"), replace(end, timings=gaps)])
    metrics = scrape_after(generate, "/completion", LINES)
    name = "vllm:inter_token_latency_seconds"
    assert metrics(f"{name}_bucket", le="0.001") == 1
    assert metrics(f"{name}_bucket", le="0.006") == 2
    assert metrics(f"{name}_bucket", le="80.0") == 2
    assert metrics(f"{name}_bucket", le="+Inf") == metrics(f"{name}_count") == 3
    assert metrics(f"{name}_sum") == pytest.approx(90.006)


def test_an_echoed_prompt_is_not_the_first_token():
    script: Script = [text("hi"), Pause(0.1), text("a"), finish(tokens=1)]
    body = {"model": CARD.id, "prompt": "hi", "echo": True}
    metrics = scrape_after(FakeGenerate(script), "/v1/completions", body)
    assert metrics("vllm:time_to_first_token_seconds_sum") > 0.05


def test_load_time_is_separate_from_queue_time():
    script: Script = [ModelLoading(progress=0), Pause(0.05), ModelLoading(progress=9), *HELLO]
    metrics = scrape_after(FakeGenerate(script), "/v1/chat/completions", {**CHAT, "stream": True})
    assert metrics("mlxrunner_request_load_time_seconds_count") == 1
    assert metrics("mlxrunner_request_load_time_seconds_sum") >= 0.05
    assert metrics("vllm:request_queue_time_seconds_sum") == pytest.approx(0.003)
    loaded = scrape_after(FakeGenerate(HELLO), "/v1/chat/completions", CHAT)
    assert loaded("mlxrunner_request_load_time_seconds_count") == 0


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (ErrorKind.BUSY, "server_busy"),
        (ErrorKind.CONTEXT_LENGTH, "context_length_exceeded"),
        (ErrorKind.ENGINE, "engine_error"),
    ],
)
def test_a_rejected_request_is_counted_by_its_reason(kind: ErrorKind, outcome: str):
    metrics = scrape_after(
        FakeGenerate(open_error=AppError(kind, "no")), "/v1/chat/completions", CHAT
    )
    assert metrics.errors() == {outcome: 1}
    assert metrics.finished_reasons() == {}
    assert metrics("vllm:time_to_first_token_seconds_count") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_is_counted_by_its_error(stream: bool):
    generate = FakeGenerate([text("a"), AppError(ErrorKind.ENGINE, "planted")])
    metrics = scrape_after(generate, "/v1/chat/completions", {**CHAT, "stream": stream})
    # a stream sends the error and ends properly, and the request still failed
    assert metrics.errors() == {"engine_error": 1}
    assert metrics.finished_reasons() == {"error": 1}


def test_an_internal_error_is_counted():
    metrics = scrape_after(FakeGenerate([text("a"), KeyError("planted")]), "/completion", LINES)
    assert metrics.errors() == {"internal_error": 1}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", {**CHAT, "stream": True}), ("/completion", LINES)]
)
def test_a_disconnect_is_counted_as_an_abort(path: str, body: Any):
    async def disconnect_after_text(conversation: Conversation) -> None:
        await conversation.until(lambda reply: b"Hel" in reply.body)
        conversation.disconnect()

    metrics = scrape_after(FakeGenerate([text("Hel"), FOREVER]), path, body, disconnect_after_text)
    assert metrics.finished_reasons() == {"abort": 1}
    assert metrics.errors() == {}
    assert metrics("vllm:time_to_first_token_seconds_count") == 1
    assert metrics("vllm:e2e_request_latency_seconds_count") == 0


def test_embedding_requests_are_counted():
    metrics = scrape_after(FakeGenerate(), "/v1/embeddings", {"model": CARD.id, "input": "x"})
    assert metrics("mlxrunner_embedding_requests_total", outcome="done") == 1
    generate = FakeGenerate(open_error=AppError(ErrorKind.BUSY, "no"))
    metrics = scrape_after(generate, "/v1/embeddings", {"model": CARD.id, "input": "x"})
    assert metrics.errors() == {"server_busy": 1}


def test_two_servers_have_separate_metrics():
    async def run() -> None:
        apps = [build_fake_app(FakeGenerate(HELLO), Settings()) for _ in range(2)]
        await Conversation(apps[0], "POST", "/completion", json.dumps(LINES).encode()).end()
        metrics = [
            Scraped(parse_exposition((await get(app, "/metrics")).body.decode())) for app in apps
        ]
        assert [each.finished_reasons() for each in metrics] == [{"stop": 1}, {}]

    asyncio.run(run())


def test_metric_names_are_unique_and_model_metrics_have_a_model_label(call: Any):
    reply = call("GET", "/metrics")
    families = list(text_string_to_metric_families(reply.body.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        if family.name.startswith("vllm:"):
            assert family.samples, family.name
            assert all({"model_name", "engine"} <= one.labels.keys() for one in family.samples)


def test_connections_and_http_requests_are_counted():
    traffic = ConnectionStats(open_connections=3, accepted_connections=9)
    traffic.closed_by_reason["invalid_http"] += 2

    async def run() -> Scraped:
        app = build_fake_app(FakeGenerate(), Settings(), traffic=traffic)
        await get(app, "/v1/models")
        await get(app, "/v1/models/none")
        await get(app, "/made-up")
        await Conversation(app, "BREW", "/v1/models").end()
        return Scraped(parse_exposition((await get(app, "/metrics")).body.decode()))

    metrics = asyncio.run(run())
    assert metrics.samples["mlxrunner_http_connections", ()] == 3
    assert metrics.samples["mlxrunner_http_connections_opened_total", ()] == 9
    name = "mlxrunner_http_connections_turned_away_total"
    assert metrics.by_label(name, "reason") == {"invalid_http": 2}
    assert metrics.samples[name, (("reason", "unread_answer"),)] == 0
    counted = {
        tuple(dict(labels)[label] for label in ("handler", "method", "status"))
        for sample, labels in metrics.samples
        if sample == "http_requests_total"
    }
    assert counted == {
        ("/v1/models", "GET", "2xx"),
        ("/v1/models/{id:path}", "GET", "4xx"),
        ("none", "none", "4xx"),
        ("/v1/models", "none", "4xx"),
    }


def test_a_disconnect_is_counted_as_a_4xx_response():
    """The server logs it with status 499."""

    async def run() -> ConnectionStats:
        traffic = ConnectionStats()
        app = build_fake_app(FakeGenerate([FOREVER]), Settings(), traffic=traffic)
        conversation = Conversation(app, "POST", "/v1/completions", None)
        conversation.disconnect()
        await conversation.end()
        return traffic

    assert asyncio.run(run()).responses == {("POST", "/v1/completions", "4xx"): 1}
