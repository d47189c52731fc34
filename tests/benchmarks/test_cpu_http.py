"""The scenarios of `make bench-cpu` through HTTP, against a server that follows a script."""

import asyncio
import itertools
import threading
import time

import pytest

from app.bench.client import StreamRecorder
from benchmarks import cpu_http, cpu_scenarios
from benchmarks.cpu_http import HTTP_TARGETS, LLAMA_SERVER, OURS, ScenarioRounds
from benchmarks.cpu_scenarios import SCENARIOS, TOKENS, TTFT_P50, HttpServer
from tests.bench.scripted_server import ScriptedExchange, ScriptedServer, answer

pytestmark = pytest.mark.exhaustive  # a tool of developers

# recorded from llama.cpp 0c1e570, without the first tokens
LLAMA_STREAM = b"""\
data: {"choices":[{"text":" w31467","index":0,"logprobs":null,"finish_reason":null}],"created":1795492137,"model":"15M","system_fingerprint":"b1-0c1e570","object":"text_completion","id":"chatcmpl-yVap"}

data: {"choices":[{"text":" w8688","index":0,"logprobs":null,"finish_reason":null}],"created":1795492137,"model":"15M","system_fingerprint":"b1-0c1e570","object":"text_completion","id":"chatcmpl-yVap"}

data: {"choices":[{"text":"","index":0,"logprobs":null,"finish_reason":"length"}],"created":1795492137,"model":"15M","system_fingerprint":"b1-0c1e570","object":"text_completion","usage":{"completion_tokens":2,"prompt_tokens":7,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":0}},"id":"chatcmpl-yVap","timings":{"cache_n":0,"prompt_n":7,"prompt_ms":4.115,"predicted_n":2,"predicted_ms":9.672}}

data: [DONE]

"""  # noqa: E501


@pytest.fixture
def quick(monkeypatch):
    """Ten arrivals of the mixed load, at once."""
    monkeypatch.setattr(cpu_scenarios, "REQUESTS", 10)
    monkeypatch.setattr(cpu_scenarios, "RATE", 1e6)


def run_scenarios(server: ScriptedServer, rounds: int = 1):
    port = int(server.url.rpartition(":")[2])
    servers = [HttpServer(name=OURS, port=port, model="scripted", fields={"ignore_eos": True})]
    return asyncio.run(cpu_http.measure(servers, rounds))


async def measure_scenario(name: str, server: HttpServer):
    [scenario] = (one for one in SCENARIOS if one.name == name)
    return await scenario.measure(server, "label")


def test_the_stream_of_llama_server_is_understood():
    recorder = StreamRecorder()
    recorder.feed(2.0, LLAMA_STREAM)
    record = recorder.make_record(1.0, max_tokens=2)
    assert record.output_tokens == 2
    assert record.prompt_tokens == 7
    assert record.arrivals == (1.0, 1.0)
    assert record.error is None


def test_each_scenario_has_its_figures(quick):
    with ScriptedServer(answer).run() as server:
        found = run_scenarios(server, rounds=2)
    assert [scenario for scenario, _ in found] == [scenario.name for scenario in SCENARIOS]
    for rounds in found.values():
        first, second = rounds.rounds
        assert first.keys() == second.keys()
        assert first[TTFT_P50] > 0
    named = {(target.scenario, target.figure) for target in HTTP_TARGETS}
    figures = {
        (scenario, figure) for (scenario, _), rounds in found.items() for figure in rounds.rounds[0]
    }
    assert named <= figures


def test_no_prompt_is_repeated_except_by_the_agent(quick):
    with ScriptedServer(answer).run() as server:
        run_scenarios(server, rounds=2)
        prompts = server.list_prompts()
        bodies = [request.body for request in server.requests]
    assert all(body["ignore_eos"] for body in bodies)
    assert all(set(prompt) <= set("abcdefghijklmnopq") for prompt in prompts)
    # a warm-up, and in each of two rounds: one client, 8, 8, 32, the mixed load and the agent
    assert len(prompts) == 1 + 2 * (1 + 8 + 8 + 32 + 10 + 20)
    assert len(set(prompts)) == len(prompts)
    # the agent is the last of a round
    turns = prompts[-20:]
    assert [len(turn) for turn in turns] == [400 + 320 * n for n in range(20)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(turns))
    others = prompts[1:80] + prompts[-99:-20]
    assert len({other[:20] for other in others if len(other) == 64}) == sum(
        len(other) == 64 for other in others
    )
    sampled = [body for body in bodies if body["temperature"]]
    assert len(sampled) == 16
    assert {body["top_p"] for body in sampled} == {0.95}
    assert {body["seed"] for body in sampled} == set(range(8))


def test_clients_of_a_scenario_run_together(quick):
    """The server answers when 32 requests of the same scenario have arrived."""
    together = threading.Barrier(32)

    def wait(exchange: ScriptedExchange) -> None:
        # only the 32 clients send this many
        together.wait(60)
        answer(exchange)

    with ScriptedServer(wait).run() as server:
        port = int(server.url.rpartition(":")[2])
        http = HttpServer(name=OURS, port=port, model="scripted")
        figures = asyncio.run(measure_scenario("32 clients", http))
    assert figures[TOKENS] > 0


def test_the_mixed_load_has_at_most_so_many_requests_at_once(quick, monkeypatch):
    monkeypatch.setattr(cpu_scenarios, "MAX_RUNNING", 3)
    changed, running, most = threading.Condition(), 0, 0

    def count(exchange: ScriptedExchange) -> None:
        nonlocal running, most
        with changed:
            running += 1
            most = max(most, running)
            changed.notify_all()
            assert changed.wait_for(lambda: most > 1, 60)
        time.sleep(0.02)  # time for an extra request; a shorter sleep could only miss it
        # before the last byte, after which the client sends the next request
        with changed:
            running -= 1
        answer(exchange)

    with ScriptedServer(count).run() as server:
        port = int(server.url.rpartition(":")[2])
        http = HttpServer(name=OURS, port=port, model="scripted")
        asyncio.run(measure_scenario("mixed load", http))
    assert 1 < most <= 3


def test_a_server_that_is_too_slow_in_a_scenario_is_left_out_from_then_on(quick, monkeypatch):
    monkeypatch.setattr(cpu_http, "PATIENCE", 4.0)
    ended = threading.Event()

    def hang_with_short_answers(exchange: ScriptedExchange) -> None:
        if exchange.body["max_tokens"] == cpu_scenarios.ANSWER:
            ended.wait(60)
        answer(exchange)

    with ScriptedServer(hang_with_short_answers).run() as server:
        found = run_scenarios(server, rounds=3)
        ended.set()
    assert [(scenario, len(rounds.rounds)) for (scenario, _), rounds in found.items()] == [
        ("1 client", 1)
    ]


def scenario_rounds(*figures: dict[str, float]) -> ScenarioRounds:
    return ScenarioRounds(rounds=list(figures))


def test_the_table_has_a_column_for_each_server_and_the_ratio_of_ours():
    found = {
        ("q4", "8 clients", OURS): scenario_rounds({TOKENS: 100}, {TOKENS: 120}),
        ("q4", "8 clients", LLAMA_SERVER): scenario_rounds({TOKENS: 50}, {TOKENS: 40}),
        ("q4", "agent", OURS): scenario_rounds({TTFT_P50: 0.5}),
    }
    head, _, clients, agent = cpu_http.format_table(found)
    assert head == "| format | scenario | figure | mlxrunner | llama-server |"
    assert clients == ("| q4 | 8 clients | tokens/s | 110 (100 to 120) | 45 (40 to 50), **2.5** |")
    assert agent == "| q4 | agent | TTFT p50, s | 0.5 |  |"


def test_a_rate_has_a_lower_bound_and_a_time_an_upper_one():
    def verdicts(scenario: str, figure: str, ours: float, theirs: float) -> list[str]:
        found = {
            ("q4", scenario, OURS): scenario_rounds({figure: ours}),
            ("q4", scenario, LLAMA_SERVER): scenario_rounds({figure: theirs}),
        }
        targets = [target for target in HTTP_TARGETS if target.scenario == scenario]
        assert targets
        return cpu_http.format_verdicts(found, [t for t in targets if t.figure == figure])

    assert verdicts("8 clients", TOKENS, 130, 100)[0].endswith("at least 1.2: met")
    assert verdicts("8 clients", TOKENS, 110, 100)[0].endswith("at least 1.2: short")
    assert verdicts("mixed load", TTFT_P50, 0.9, 1.0)[0].endswith("at most 1: met")
    assert verdicts("mixed load", TTFT_P50, 1.1, 1.0)[0].endswith("at most 1: short")


def test_the_chart_has_a_panel_for_each_scenario_with_a_rate():
    found = {
        ("q4", "8 clients", OURS): scenario_rounds({TOKENS: 100}),
        ("q4", "agent", OURS): scenario_rounds({TTFT_P50: 0.5}),
    }
    chart = cpu_http.draw_chart(found, "110M")
    assert "q4, 8 clients" in chart
    assert "agent" not in chart
