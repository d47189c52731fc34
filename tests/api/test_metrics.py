"""/metrics: what a scraper reads is what happened, and what /v1/status says."""

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
from app.core.model_state import ModelState
from app.core.ports import RunnerStatus
from app.core.server_stats import ConnectionStats
from app.core.settings import Settings
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
LINES: Any = {"prompt": "hi"}


def read(exposition: str) -> Samples:
    """Every sample by its name and labels, as a scraper parses them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


@dataclass
class Scraped:
    """Samples of the model that the fakes serve, unless labels say otherwise."""

    samples: Samples

    def __call__(self, name: str, **labels: str) -> float:
        of = {"model_name": CARD.id, "engine": "0", **labels}
        found = self.samples.get((name, tuple(sorted(of.items()))))
        return self.samples[name, tuple(sorted(labels.items()))] if found is None else found

    def of(self, name: str, label: str) -> dict[str, float]:
        """A family's samples above zero by one of their labels, whatever the others are."""
        return {
            dict(labels)[label]: value
            for (sample, labels), value in self.samples.items()
            if sample == name and value
        }

    def ended(self) -> dict[str, float]:
        return self.of("vllm:request_success_total", "finished_reason")

    def errors(self) -> dict[str, float]:
        return self.of("mlxrunner_request_errors_total", "reason")


async def get(app: Any, path: str) -> Any:
    return await Conversation(app, "GET", path).end()


def scrape(call: Any) -> Scraped:
    reply = call("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scraped(read(reply.body.decode()))


def after(
    generate: FakeGenerate,
    path: str,
    body: Any,
    act: Callable[[Conversation], Coroutine[Any, Any, None]] | None = None,
) -> Scraped:
    """What is told after one request to an application of its own."""

    async def run() -> Scraped:
        app = build_fake_app(generate, Settings())
        conversation = Conversation(app, "POST", path, json.dumps(body).encode())
        if act is not None:
            await act(conversation)
        await conversation.end()
        return Scraped(read((await get(app, "/metrics")).body.decode()))

    return asyncio.run(run())


def test_the_engines_figures_are_those_of_the_status(call: Any):
    told, status = scrape(call), call("GET", "/v1/status").json
    tokens = status["Tokens"]
    assert told("vllm:num_requests_running") == status["Running"]
    assert told("vllm:num_requests_waiting") == status["Waiting"]
    assert told("mlxrunner_num_requests_preparing") == status["Preparing"]
    assert told("mlxrunner_num_requests_compiling") == status["Compiling"]
    assert told("mlxrunner_max_num_seqs") == status["Parallel"]
    assert told("mlxrunner_max_model_len") == status["ContextLength"]
    assert told("vllm:prompt_tokens_total") == tokens["cached"] + tokens["prefilled"]
    assert told("vllm:generation_tokens_total") == tokens["generated"]
    assert told("vllm:prefix_cache_hits_total") == tokens["cached"]
    assert told("vllm:prefix_cache_queries_total") == STATS.prefix_query_tokens
    assert told("vllm:num_preemptions_total") == status["Preemptions"]
    assert told("mlxrunner_prefix_cache_evictions_total") == status["Evictions"]
    assert told("mlxrunner_engine_failures_total") == status["Failures"]
    assert told("mlxrunner_engine_steps_total") == status["Steps"]
    assert told("mlxrunner_allocator_bytes") == status["Memory"]
    for reason, count in status["Misses"].items():
        assert told("mlxrunner_prefix_cache_misses_total", reason=reason) == count


def test_the_lines_of_the_ledger_add_up_to_the_budget(call: Any):
    told, ledger = scrape(call), call("GET", "/v1/status").json["Ledger"]
    lines = {line: bytes_ for line, bytes_ in ledger.items() if line != "budget"}
    assert {line: told("mlxrunner_memory_bytes", line=line) for line in lines} == lines
    assert told("mlxrunner_memory_budget_bytes") == ledger["budget"] == sum(lines.values())


def test_the_cache_is_as_full_as_running_requests_hold_it(call: Any, generate: FakeGenerate):
    """What is remembered and nobody runs on counts as free, as with vLLM's blocks."""
    assert scrape(call)("vllm:kv_cache_usage_perc") == pytest.approx(250 / (250 + 100 + 200))
    generate.runner_status = RunnerStatus(state="loading", progress=0, stats=EngineStats())
    assert scrape(call)("vllm:kv_cache_usage_perc") == 0


def test_hits_are_a_histogram_of_cached_lengths(call: Any):
    told, hits = scrape(call), call("GET", "/v1/status").json["Hits"]
    name = "mlxrunner_prefix_cache_hit_tokens"
    assert told(f"{name}_bucket", le="0.0") == hits["0"]
    assert told(f"{name}_bucket", le="64.0") == 5
    assert told(f"{name}_bucket", le="65536.0") == 7
    assert told(f"{name}_bucket", le="+Inf") == sum(hits.values())
    assert told(f"{name}_count") == sum(hits.values())
    assert told(f"{name}_sum") == 700


@pytest.mark.parametrize("state", ["loading", "ready", "stalled", "failed"])
def test_one_state_is_the_present_one(call: Any, generate: FakeGenerate, state: Any):
    generate.runner_status = RunnerStatus(state=state, progress=0, stats=EngineStats())
    told = scrape(call)
    assert told.of("mlxrunner_state", "state") == {state: 1}
    assert told.of("mlxrunner_model_state", "state") == {state: 1}


def test_before_a_model_is_loaded_nothing_is_said_of_what_it_can_do(
    call: Any, generate: FakeGenerate, monkeypatch: pytest.MonkeyPatch
):
    on_disk = ModelState(name=CARD.id, phase="unloaded")
    monkeypatch.setattr(generate, "list_model_states", lambda: [on_disk])
    told = scrape(call)
    names = {name for name, _ in told.samples}
    assert not names & {f"mlxrunner_{n}" for n in ("max_num_seqs", "max_model_len")}
    assert "mlxrunner_model_share_bytes" not in names
    assert told.of("mlxrunner_model_state", "state") == {"unloaded": 1}


def test_every_model_is_told_apart():
    generate = FakeGenerate(HELLO, cards=(CARD, replace(CARD, id="other")))
    told = after(generate, "/v1/chat/completions", {**CHAT, "model": "other"})
    name = "vllm:time_to_first_token_seconds_count"
    assert told(name) == 0
    assert told(name, model_name="other") == 1
    assert told("vllm:num_requests_running", model_name="other") == STATS.running


def test_what_a_client_made_up_is_no_label():
    for path, body in (
        ("/v1/embeddings", {"model": "made up", "input": "x"}),
        ("/v1/chat/completions", {**CHAT, "model": "made up"}),
    ):
        told = after(FakeGenerate(), path, body)
        assert {dict(labels).get("model_name") for _, labels in told.samples} == {CARD.id, None}


@pytest.mark.parametrize("asked", ["m", "m:latest"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/embeddings", {"input": "x"})],
)
def test_a_model_is_one_under_both_of_its_names(path: str, body: Any, asked: str):
    generate = FakeGenerate(
        open_error=AppError(ErrorKind.BUSY, "no"), cards=(replace(CARD, id="m"),)
    )
    told = after(generate, path, {**body, "model": asked})
    assert told.of("mlxrunner_request_errors_total", "model_name") == {"m": 1}
    assert {name for _, labels in told.samples for key, name in labels if key == "model_name"} == {
        "m"
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_is_counted_by_its_finish_reason(stream: bool, reason: Any):
    generate = FakeGenerate([text("a"), finish(reason)])
    told = after(generate, "/v1/chat/completions", {**CHAT, "stream": stream})
    assert told.ended() == {reason: 1}
    assert told.errors() == {}
    assert told("vllm:request_success_total", finished_reason="error") == 0


def test_a_call_ends_as_vllms_engine_says():
    told = after(FakeGenerate([finish("tool_calls")]), "/v1/chat/completions", CHAT)
    assert told.ended() == {"stop": 1}


def test_each_choice_is_counted_and_the_request_once():
    told = after(FakeGenerate(), "/v1/chat/completions", {**CHAT, "n": 3, "max_tokens": 9})
    assert told.ended() == {"stop": 3}
    assert told("vllm:e2e_request_latency_seconds_count") == 3
    assert told("vllm:time_to_first_token_seconds_count") == 3
    assert told("vllm:request_params_n_sum") == 3
    assert told("vllm:request_params_n_count") == 1
    assert told("vllm:request_params_max_tokens_sum") == 9
    assert told("vllm:request_generation_tokens_sum") == 6
    assert told("vllm:request_prompt_tokens_sum") == 21
    assert told("vllm:request_prefill_kv_computed_tokens_sum") == 12


def test_times_are_those_of_the_phases():
    """Two milliseconds of prefill and thirty of decoding, of thirty-five in all."""
    slow: Script = [
        Pause(0.03),
        PrefillProgress(computed_tokens=1, total_tokens=9),
        PrefillProgress(computed_tokens=9, total_tokens=9),
        Pause(0.06),
        text("a"),
        text("b"),
        finish(tokens=4),
    ]
    told = after(FakeGenerate(slow), "/v1/chat/completions", {**CHAT, "stream": True})
    assert told("vllm:time_to_first_token_seconds_count") == 1
    assert told("vllm:time_to_first_token_seconds_sum") >= 0.09
    assert told("vllm:e2e_request_latency_seconds_sum") >= 0.09
    phases = {
        name: told(f"vllm:request_{name}_time_seconds_sum")
        for name in ("queue", "prefill", "decode", "inference")
    }
    assert phases == pytest.approx(
        {"queue": 0.003, "prefill": 0.002, "decode": 0.030, "inference": 0.032}
    )
    per_token = "vllm:request_time_per_output_token_seconds"
    # thirty milliseconds between the first of four tokens and the last
    assert told(f"{per_token}_sum") == pytest.approx(0.01)
    assert told(f"{per_token}_bucket", le="0.008") == 0
    assert told(f"{per_token}_bucket", le="0.01") == 1


def test_one_token_has_no_time_between_tokens():
    told = after(FakeGenerate([text("a"), finish(tokens=1)]), "/completion", LINES)
    assert told("vllm:request_time_per_output_token_seconds_count") == 0
    assert told("vllm:inter_token_latency_seconds_count") == 0


def test_gaps_between_tokens_are_the_engines():
    """Not of when a client happened to read them."""
    end = finish(tokens=4)
    gaps = replace(end.timings, inter_token_ns=(1_000_000, 5_000_000, 90_000_000_000))
    generate = FakeGenerate([text("abcd"), replace(end, timings=gaps)])
    told = after(generate, "/completion", LINES)
    name = "vllm:inter_token_latency_seconds"
    assert told(f"{name}_bucket", le="0.001") == 1
    assert told(f"{name}_bucket", le="0.006") == 2
    assert told(f"{name}_bucket", le="80.0") == 2
    assert told(f"{name}_bucket", le="+Inf") == told(f"{name}_count") == 3
    assert told(f"{name}_sum") == pytest.approx(90.006)


def test_an_echoed_prompt_is_no_first_token():
    script: Script = [text("hi"), Pause(0.1), text("a"), finish(tokens=1)]
    body = {"model": CARD.id, "prompt": "hi", "echo": True}
    told = after(FakeGenerate(script), "/v1/completions", body)
    assert told("vllm:time_to_first_token_seconds_sum") > 0.05


def test_a_load_is_timed_apart_from_the_queue():
    script: Script = [ModelLoading(progress=0), Pause(0.05), ModelLoading(progress=9), *HELLO]
    told = after(FakeGenerate(script), "/v1/chat/completions", {**CHAT, "stream": True})
    assert told("mlxrunner_request_load_time_seconds_count") == 1
    assert told("mlxrunner_request_load_time_seconds_sum") >= 0.05
    assert told("vllm:request_queue_time_seconds_sum") == pytest.approx(0.003)
    loaded = after(FakeGenerate(HELLO), "/v1/chat/completions", CHAT)
    assert loaded("mlxrunner_request_load_time_seconds_count") == 0


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (ErrorKind.BUSY, "server_busy"),
        (ErrorKind.CONTEXT_LENGTH, "context_length_exceeded"),
        (ErrorKind.ENGINE, "engine_error"),
    ],
)
def test_a_refused_request_is_counted_by_its_reason(kind: ErrorKind, outcome: str):
    told = after(FakeGenerate(open_error=AppError(kind, "no")), "/v1/chat/completions", CHAT)
    assert told.errors() == {outcome: 1}
    assert told.ended() == {}
    assert told("vllm:time_to_first_token_seconds_count") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_off_is_counted_by_its_error(stream: bool):
    generate = FakeGenerate([text("a"), AppError(ErrorKind.ENGINE, "planted")])
    told = after(generate, "/v1/chat/completions", {**CHAT, "stream": stream})
    # a stream tells its client and leaves in good order, and still the answer broke off
    assert told.errors() == {"engine_error": 1}
    assert told.ended() == {"error": 1}


def test_a_fault_of_ours_is_counted_as_one():
    told = after(FakeGenerate([text("a"), KeyError("planted")]), "/completion", LINES)
    assert told.errors() == {"internal_error": 1}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", {**CHAT, "stream": True}), ("/completion", LINES)]
)
def test_a_client_that_leaves_is_counted_as_an_abort(path: str, body: Any):
    async def leave(conversation: Conversation) -> None:
        await conversation.until(lambda reply: b"Hel" in reply.body)
        conversation.hang_up()

    told = after(FakeGenerate([text("Hel"), FOREVER]), path, body, leave)
    assert told.ended() == {"abort": 1}
    assert told.errors() == {}
    assert told("vllm:time_to_first_token_seconds_count") == 1
    assert told("vllm:e2e_request_latency_seconds_count") == 0


def test_vectors_are_counted_too():
    told = after(FakeGenerate(), "/v1/embeddings", {"model": CARD.id, "input": "x"})
    assert told("mlxrunner_embedding_requests_total", outcome="done") == 1
    generate = FakeGenerate(open_error=AppError(ErrorKind.BUSY, "no"))
    told = after(generate, "/v1/embeddings", {"model": CARD.id, "input": "x"})
    assert told.errors() == {"server_busy": 1}


def test_two_servers_count_apart():
    async def run() -> None:
        apps = [build_fake_app(FakeGenerate(HELLO), Settings()) for _ in range(2)]
        await Conversation(apps[0], "POST", "/completion", json.dumps(LINES).encode()).end()
        told = [Scraped(read((await get(app, "/metrics")).body.decode())) for app in apps]
        assert [one.ended() for one in told] == [{"stop": 1}, {}]

    asyncio.run(run())


def test_no_figure_has_two_names_and_every_family_of_a_model_names_it(call: Any):
    reply = call("GET", "/metrics")
    families = list(text_string_to_metric_families(reply.body.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        if family.name.startswith("vllm:"):
            assert family.samples, family.name
            assert all({"model_name", "engine"} <= one.labels.keys() for one in family.samples)


def test_what_came_to_the_door_is_told():
    traffic = ConnectionStats(open_connections=3, accepted_connections=9)
    traffic.closed_by_reason["invalid_http"] += 2

    async def run() -> Scraped:
        app = build_fake_app(FakeGenerate(), Settings(), traffic=traffic)
        await get(app, "/v1/models")
        await get(app, "/v1/models/none")
        await get(app, "/made-up")
        await Conversation(app, "BREW", "/v1/models").end()
        return Scraped(read((await get(app, "/metrics")).body.decode()))

    told = asyncio.run(run())
    assert told.samples["mlxrunner_http_connections", ()] == 3
    assert told.samples["mlxrunner_http_connections_opened_total", ()] == 9
    name = "mlxrunner_http_connections_turned_away_total"
    assert told.of(name, "reason") == {"invalid_http": 2}
    assert told.samples[name, (("reason", "unread_answer"),)] == 0
    answered = {
        tuple(dict(labels)[label] for label in ("handler", "method", "status"))
        for sample, labels in told.samples
        if sample == "http_requests_total"
    }
    assert answered == {
        ("/v1/models", "GET", "2xx"),
        ("/v1/models/{id:path}", "GET", "4xx"),
        ("none", "none", "4xx"),
        ("/v1/models", "none", "4xx"),
    }


def test_a_client_that_left_is_an_answer_of_class_four():
    """Whatever would have come of it: the server's log has 499."""

    async def run() -> ConnectionStats:
        traffic = ConnectionStats()
        app = build_fake_app(FakeGenerate([FOREVER]), Settings(), traffic=traffic)
        conversation = Conversation(app, "POST", "/v1/completions", None)
        conversation.hang_up()
        await conversation.end()
        return traffic

    assert asyncio.run(run()).responses == {("POST", "/v1/completions", "4xx"): 1}
