"""The table, the JSON and the chart of a benchmark."""

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest

from app.bench.benchmark import BenchConfig, BenchTarget, LoadLevel, TargetResult
from app.bench.client import ConnectionPool, RequestError, RequestRecord, ServerAddress
from app.bench.metrics import LoadRecord, MetricOptions
from app.bench.report import BenchReport, LinePanel, draw_lines, format_value

ONE, FOUR = LoadLevel(max_concurrency=1), LoadLevel(max_concurrency=4)

NUMBER = {"type": ["number", "null"]}
LATENCIES = ("ttft", "tpot", "itl", "e2el")
LATENCY_KEYS = [
    f"{statistic}_{name}_ms"
    for name in LATENCIES
    for statistic in ("mean", "median", "std", "p50", "p90", "p99")
]
METRIC_KEYS = [
    "completed",
    "failed",
    "cancelled",
    "ended_early",
    "duration",
    "total_input_tokens",
    "total_cached_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_concurrent_requests",
    "tokens_per_chunk",
    "client_cpu_share",
    "client_lag_p99_ms",
    *LATENCY_KEYS,
]


def make_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


LEVEL = {"max_concurrency": NUMBER, "request_rate": NUMBER, "burstiness": {"type": "number"}}
METRICS = dict.fromkeys(METRIC_KEYS, NUMBER)
ERROR = make_object({"count": {"type": "integer"}, "message": {"type": "string"}})
SCHEMA = make_object(
    {
        "schema": {"const": 1},
        "interrupted": {"type": "boolean"},
        "config": make_object(
            {
                "endpoint": {"type": "string"},
                "dataset": {"type": "string"},
                "output_len": {"type": "integer"},
                "rounds": {"type": "integer"},
                "temperature": {"type": "number"},
                "extra_body": {"type": "object"},
                "seed": {"type": "string"},
                "goodput_ms": {"type": "object", "additionalProperties": {"type": "number"}},
            }
        ),
        "servers": {
            "type": "array",
            "items": make_object(
                {
                    "base_url": {"type": "string"},
                    "model": {"type": "string"},
                    "ignore_eos": {"type": "boolean"},
                    "tokens_per_word": {"type": "number"},
                    "levels": {
                        "type": "array",
                        "items": make_object(
                            {
                                **LEVEL,
                                **METRICS,
                                "errors": {"type": "object", "additionalProperties": ERROR},
                                "rounds": {"type": "array", "items": make_object(METRICS)},
                            }
                        ),
                    },
                }
            ),
        },
        "ratios": {
            "type": "array",
            "items": {"type": "object", "properties": LEVEL, "required": list(LEVEL)},
        },
    }
)


def complete(*arrivals: float) -> RequestRecord:
    return RequestRecord(
        sent=0.0,
        arrivals=arrivals,
        latency=arrivals[-1],
        output_tokens=len(arrivals),
        prompt_tokens=10,
        finish_reason="length",
    )


def fail(kind: str) -> RequestRecord:
    return RequestRecord(
        sent=0.0, latency=1.0, error=RequestError(kind=kind, message=f"why {kind}")
    )


def load(*requests: RequestRecord, duration: float = 1.0, **fields: Any) -> LoadRecord:
    return LoadRecord(requests=requests, duration=duration, **fields)


def make_result(name: str, loads: dict[LoadLevel, list[LoadRecord]]) -> TargetResult:
    address = ServerAddress.parse(f"http://{name}:8080", "a-secret-key")
    return TargetResult(
        target=BenchTarget(pool=ConnectionPool(address), model=f"model-{name}"), loads=loads
    )


def make_report(
    results: Sequence[TargetResult],
    *,
    options: MetricOptions | None = None,
    latencies: Sequence[str] = LATENCIES,
    interrupted: bool = False,
    **config: Any,
) -> BenchReport:
    return BenchReport(
        BenchConfig(levels=(ONE, FOUR), **config),
        results,
        options or MetricOptions(),
        latencies,
        interrupted=interrupted,
    )


FAST, SLOW = complete(0.1, 0.11, 0.12), complete(0.2, 0.22, 0.24)
SINGLE = [make_result("a", {ONE: [load(FAST)], FOUR: [load(FAST, SLOW, duration=0.5)]})]
PAIR = [
    make_result("a", {ONE: [load(FAST), load(FAST)]}),
    make_result("b", {ONE: [load(SLOW, duration=2.0), load(SLOW, duration=4.0)]}),
]


def find_row(table: str, title: str) -> list[str]:
    [row] = [line for line in table.splitlines() if line.startswith(title + "  ")]
    return row.removeprefix(title).split()


def test_the_table_of_a_server_has_a_column_per_level() -> None:
    table = make_report(SINGLE).render_table()
    assert table.startswith("model-a at http://a:8080/v1/chat/completions\n")
    assert find_row(table, "concurrency") == ["1", "4"]
    assert find_row(table, "completed requests") == ["1", "2"]
    assert find_row(table, "output tokens/s") == ["3", "12"]
    assert find_row(table, "TTFT mean, ms") == ["100", "150"]
    assert find_row(table, "TPOT median, ms") == ["10", "15"]
    assert find_row(table, "of which cached") == ["-", "-"]
    assert "good requests/s" not in table
    assert len({len(line) for line in table.splitlines()[3:]}) == 1


def test_the_table_has_the_selected_latencies_percentiles_and_goodput() -> None:
    options = MetricOptions(percentiles=(95.0,), goodput={"ttft": 0.15})
    table = make_report(SINGLE, options=options, latencies=("ttft",)).render_table()
    assert find_row(table, "TTFT p95, ms") == ["100", "195"]
    assert find_row(table, "good requests/s") == ["1", "2"]
    assert "TPOT" not in table


def test_the_table_of_two_servers_has_ratios() -> None:
    table = make_report(PAIR, rounds=2).render_table()
    assert "A: model-a at http://a:8080" in table
    assert "median of 2 rounds" in table
    assert table.splitlines()[4].split() == ["concurrency", "1", "A", "B", "A", "/", "B"]
    # the rounds have ratios of 2 and 4
    assert find_row(table, "output tokens/s") == ["3", "1.12", "3"]
    assert find_row(table, "TTFT mean, ms") == ["100", "200", "0.5"]
    assert find_row(table, "completed requests") == ["2", "2", "-"]


def test_failures_are_listed_by_kind() -> None:
    result = make_result("a", {ONE: [load(FAST, fail("timeout"), fail("http_429"))]})
    table = make_report([result]).render_table()
    assert find_row(table, "failed requests") == ["2"]
    assert "model-a, concurrency 1: 1 request failed: timeout: why timeout\n" in table
    assert "1 request failed: http_429: why http_429\n" in table


def test_a_report_without_a_completed_request_has_dashes() -> None:
    report = make_report([make_result("a", {ONE: [load(fail("timeout"))]})])
    assert report.completed == 0
    assert find_row(report.render_table(), "TTFT mean, ms") == ["-"]
    assert json.loads(json.dumps(report.make_json()))["servers"][0]["levels"][0]["failed"] == 1


@pytest.mark.parametrize(
    ("record", "note"),
    [
        (load(FAST, cancelled=2), "2 requests cancelled"),
        (
            load(FAST, cpu_seconds=0.8),
            "this client used 80% of a core, which may affect the results",
        ),
        (load(FAST, lag=[0.05] * 3), "this client was delayed by 50 ms"),
    ],
)
def test_the_table_says_what_affects_the_results(record: LoadRecord, note: str) -> None:
    assert note in make_report([make_result("a", {ONE: [record]})]).render_table()
    assert "client" not in make_report(SINGLE).render_table()


def test_responses_that_ended_early_are_counted() -> None:
    early = RequestRecord(
        sent=0.0, arrivals=(0.1,), latency=0.1, output_tokens=1, finish_reason="stop"
    )
    table = make_report([make_result("a", {ONE: [load(FAST, early)]})]).render_table()
    assert "1 response ended before the output length" in table


def test_an_interrupted_report_has_the_results_so_far() -> None:
    """B has no round of the level yet."""
    results = [PAIR[0], make_result("b", {})]
    report = make_report(results, interrupted=True)
    assert "interrupted: these are the results so far" in report.render_table()
    assert find_row(report.render_table(), "output tokens/s") == ["3", "-", "-"]
    assert report.make_json()["interrupted"] is True
    ElementTree.fromstring(report.draw_chart())


def test_a_level_of_rates_is_named_so() -> None:
    level = LoadLevel(request_rate=2.0)
    result = make_result("a", {level: [load(FAST)]})
    report = BenchReport(BenchConfig(levels=(level,)), [result], MetricOptions(), LATENCIES)
    assert find_row(report.render_table(), "request rate") == ["2/s"]


@pytest.mark.parametrize("results", [SINGLE, PAIR], ids=["one server", "two servers"])
def test_the_json_follows_its_schema(results: list[TargetResult]) -> None:
    options = MetricOptions(goodput={"ttft": 0.15, "tpot": 0.05})
    document = json.loads(json.dumps(make_report(results, options=options).make_json()))
    jsonschema_rs.validate(SCHEMA, document)
    assert document["config"]["goodput_ms"] == {"ttft": 150, "tpot": 50}
    assert "a-secret-key" not in json.dumps(document)


def test_the_json_has_each_round_and_their_median() -> None:
    [a, b] = make_report(PAIR).make_json()["servers"]
    [level] = b["levels"]
    assert [values["output_throughput"] for values in level["rounds"]] == [1.5, 0.75]
    assert level["output_throughput"] == 1.125
    assert level["total_output_tokens"] == 6
    assert a["levels"][0]["max_concurrency"] == 1
    assert a["levels"][0]["request_rate"] is None


def test_the_json_has_ratios_of_two_servers() -> None:
    [ratios] = make_report(PAIR).make_json()["ratios"]
    assert ratios["output_throughput"] == 3.0
    assert ratios["mean_ttft_ms"] == pytest.approx(0.5)
    assert make_report(SINGLE).make_json()["ratios"] == []


def test_an_infinite_rate_is_valid_json() -> None:
    json.dumps(make_report(SINGLE).make_json(), allow_nan=False)
    assert math.isinf(ONE.request_rate)


SVG = "{http://www.w3.org/2000/svg}"


def test_the_chart_has_a_panel_per_metric_and_a_line_per_server() -> None:
    chart = ElementTree.fromstring(make_report(PAIR, latencies=("ttft",)).draw_chart())
    words = [element.text for element in chart.iter(f"{SVG}text")]
    assert "output tokens/s by concurrency" in words
    assert "median TTFT, ms by concurrency" in words
    assert {"A", "B"} <= set(words)
    assert len(list(chart.iter(f"{SVG}polyline"))) == 4


def test_a_line_has_a_point_per_value_within_the_panel() -> None:
    panel = LinePanel(title="t", labels=["1", "2", "4"], lines={"x": [1.0, None, 2.0]})
    chart = ElementTree.fromstring(draw_lines("<title>", [panel]))
    points = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in chart.iter(f"{SVG}circle")]
    assert len(points) == 2
    [first, last] = points
    assert first[0] < last[0]
    assert first[1] > last[1]
    assert all(0 < x < float(chart.attrib["width"]) for x, _ in points)
    assert all(0 < y < float(chart.attrib["height"]) for _, y in points)


def test_a_chart_without_values_is_drawn() -> None:
    ElementTree.fromstring(
        draw_lines("t", [LinePanel(title="t", labels=["1"], lines={"x": [None]})])
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (12345, "12345"),
        (0.01234, "0.0123"),
        (99.96, "100"),
        (4321.9, "4322"),
    ],
)
def test_values_have_three_digits_or_more(value: float | None, text: str) -> None:
    assert format_value(value) == text
