"""/metrics: what a scraper reads is what happened, and what /v1/status says."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.api.app import build_app
from app.core.errors import AppError, Kind
from app.core.events import Progress
from app.core.jobs import EngineStats
from app.core.ports import RunnerStatus
from app.core.settings import Settings
from tests.api.asgi import Conversation
from tests.fakes import CARD, FOREVER, HELLO, FakeGenerate, Pause, Script, finish, text

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
    samples: Samples

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[f"mlxrunner_{name}", tuple(sorted(labels.items()))]

    def outcomes(self) -> dict[str, float]:
        return {
            labels[0][1]: value
            for (name, labels), value in self.samples.items()
            if name == "mlxrunner_requests_total"
        }


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
        app = build_app(generate, Settings())
        conversation = Conversation(app, "POST", path, json.dumps(body).encode())
        if act is not None:
            await act(conversation)
        await conversation.end()
        return Scraped(read((await get(app, "/metrics")).body.decode()))

    return asyncio.run(run())


def test_the_engines_figures_are_those_of_the_status(call: Any):
    told, status = scrape(call), call("GET", "/v1/status").json
    assert told("num_requests_running") == status["Running"]
    assert told("num_requests_waiting") == status["Waiting"]
    assert told("max_num_seqs") == status["Parallel"]
    assert told("max_model_len") == status["ContextLength"]
    assert told("prompt_tokens_total", source="cache") == status["Tokens"]["cached"]
    assert told("prompt_tokens_total", source="computed") == status["Tokens"]["prefilled"]
    assert told("generation_tokens_total") == status["Tokens"]["generated"]
    assert told("num_preemptions_total") == status["Preemptions"]
    assert told("prefix_cache_evictions_total") == status["Evictions"]
    assert told("engine_failures_total") == status["Failures"]
    assert told("engine_steps_total") == status["Steps"]
    assert told("allocator_bytes") == status["Memory"]
    for reason, count in status["Misses"].items():
        assert told("prefix_cache_misses_total", reason=reason) == count


def test_the_lines_of_the_ledger_add_up_to_the_budget(call: Any):
    told, ledger = scrape(call), call("GET", "/v1/status").json["Ledger"]
    lines = {line: bytes_ for line, bytes_ in ledger.items() if line != "budget"}
    assert {line: told("memory_bytes", line=line) for line in lines} == lines
    assert told("memory_budget_bytes") == ledger["budget"] == sum(lines.values())


def test_hits_are_a_histogram_of_cached_lengths(call: Any):
    told, hits = scrape(call), call("GET", "/v1/status").json["Hits"]
    assert told("prefix_cache_hit_tokens_bucket", le="0.0") == hits["0"]
    assert told("prefix_cache_hit_tokens_bucket", le="64.0") == 5
    assert told("prefix_cache_hit_tokens_bucket", le="65536.0") == 7
    assert told("prefix_cache_hit_tokens_bucket", le="+Inf") == sum(hits.values())
    assert told("prefix_cache_hit_tokens_count") == sum(hits.values())
    assert told("prefix_cache_hit_tokens_sum") == 700


@pytest.mark.parametrize("state", ["loading", "ready", "stalled", "failed"])
def test_one_state_is_the_present_one(call: Any, generate: FakeGenerate, state: Any):
    generate.now = RunnerStatus(state=state, progress=0, stats=EngineStats())
    told = scrape(call)
    states = ("loading", "ready", "stalled", "failed")
    assert [told("state", state=name) for name in states] == [name == state for name in states]


def test_before_a_model_is_loaded_nothing_is_said_of_what_it_can_do(
    call: Any, generate: FakeGenerate
):
    generate.now = RunnerStatus(state="loading", progress=3, stats=EngineStats())
    names = {name for name, _ in scrape(call).samples}
    assert not names & {"mlxrunner_max_num_seqs", "mlxrunner_max_model_len"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_is_counted_by_its_finish_reason(stream: bool, reason: Any):
    generate = FakeGenerate([text("a"), finish(reason)])
    told = after(generate, "/v1/chat/completions", {**CHAT, "stream": stream})
    assert told.outcomes() == {reason: 1}


def test_times_are_observed_once_for_each_answer():
    slow: Script = [
        Pause(0.03),
        Progress(done=1, total=9),
        Progress(done=9, total=9),
        Pause(0.06),
        text("a"),
        text("b"),
        finish(tokens=4),
    ]
    told = after(FakeGenerate(slow), "/v1/chat/completions", {**CHAT, "stream": True})
    queue, first = "request_queue_time_seconds", "time_to_first_token_seconds"
    assert told(f"{queue}_count") == told(f"{first}_count") == 1
    assert told(f"{queue}_sum") >= 0.03
    assert told(f"{first}_sum") >= told(f"{queue}_sum") + 0.06
    per_token = "request_time_per_output_token_seconds"
    # thirty milliseconds between the first of four tokens and the last
    assert told(f"{per_token}_sum") == pytest.approx(0.01)
    assert told(f"{per_token}_bucket", le="0.008") == 0
    assert told(f"{per_token}_bucket", le="0.015") == 1


def test_one_token_has_no_time_between_tokens():
    told = after(FakeGenerate([text("a"), finish(tokens=1)]), "/completion", LINES)
    assert told("request_time_per_output_token_seconds_count") == 0


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        (Kind.BUSY, "server_busy"),
        (Kind.CONTEXT_LENGTH, "context_length_exceeded"),
        (Kind.ENGINE, "engine_error"),
    ],
)
def test_a_refused_request_is_counted_by_its_reason(kind: Kind, outcome: str):
    told = after(FakeGenerate(refusal=AppError(kind, "no")), "/v1/chat/completions", CHAT)
    assert told.outcomes() == {outcome: 1}
    assert told("time_to_first_token_seconds_count") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_off_is_counted_by_its_error(stream: bool):
    generate = FakeGenerate([text("a"), AppError(Kind.ENGINE, "planted")])
    told = after(generate, "/v1/chat/completions", {**CHAT, "stream": stream})
    # a stream tells its client and leaves in good order, and still the answer broke off
    assert told.outcomes() == {"engine_error": 1}


def test_a_fault_of_ours_is_counted_as_one():
    told = after(FakeGenerate([text("a"), KeyError("planted")]), "/completion", LINES)
    assert told.outcomes() == {"internal_error": 1}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", {**CHAT, "stream": True}), ("/completion", LINES)]
)
def test_a_client_that_leaves_is_counted_as_cancelled(path: str, body: Any):
    async def leave(conversation: Conversation) -> None:
        await conversation.until(lambda reply: b"Hel" in reply.body)
        conversation.hang_up()

    told = after(FakeGenerate([text("Hel"), FOREVER]), path, body, leave)
    assert told.outcomes() == {"cancelled": 1}
    assert told("time_to_first_token_seconds_count") == 1


def test_two_servers_count_apart():
    async def run() -> None:
        apps = [build_app(FakeGenerate(HELLO), Settings()) for _ in range(2)]
        await Conversation(apps[0], "POST", "/completion", json.dumps(LINES).encode()).end()
        told = [Scraped(read((await get(app, "/metrics")).body.decode())) for app in apps]
        assert [one.outcomes() for one in told] == [{"stop": 1}, {}]

    asyncio.run(run())
