"""The definitions of the metrics, with figures computed by hand."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.bench.client import RequestError, RequestRecord
from app.bench.metrics import (
    LoadRecord,
    MetricOptions,
    Values,
    combine_rounds,
    compute_metrics,
    compute_ratios,
    count_errors,
    is_good,
    percentile,
)


def complete(
    *arrivals: float,
    sent: float = 0.0,
    tokens: int | None = None,
    latency: float | None = None,
    prompt: int | None = 10,
    cached: int | None = None,
    finish: str = "length",
) -> RequestRecord:
    return RequestRecord(
        sent=sent,
        arrivals=arrivals,
        latency=arrivals[-1] if latency is None else latency,
        output_tokens=len(arrivals) if tokens is None else tokens,
        prompt_tokens=prompt,
        cached_tokens=cached,
        finish_reason=finish,
    )


def fail(kind: str, message: str = "m") -> RequestRecord:
    return RequestRecord(sent=0.0, latency=9.0, error=RequestError(kind=kind, message=message))


def measure(
    *requests: RequestRecord, duration: float = 2.0, options: MetricOptions | None = None
) -> Values:
    load = LoadRecord(requests=requests, duration=duration)
    return compute_metrics(load, options or MetricOptions())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_all_definitions_for_two_requests() -> None:
    values = measure(
        complete(0.1, 0.2, 0.4, latency=0.5, cached=4),
        complete(0.3, 0.5, sent=1.0, tokens=5, cached=0),
    )
    assert values["completed"] == 2
    assert values["total_input_tokens"] == 20
    assert values["total_cached_tokens"] == 4
    assert values["total_output_tokens"] == 8
    assert values["request_throughput"] == 1.0
    assert values["output_throughput"] == 4.0
    assert values["total_token_throughput"] == 14.0
    assert values["tokens_per_chunk"] == 8 / 5
    assert values["mean_ttft_ms"] == pytest.approx(200)
    assert values["median_ttft_ms"] == pytest.approx(200)
    assert values["std_ttft_ms"] == pytest.approx(100)
    assert values["p99_ttft_ms"] == pytest.approx(298)
    # (0.5 - 0.1) / 2 and (0.5 - 0.3) / 4
    assert values["mean_tpot_ms"] == pytest.approx(125)
    # gaps of 0.1, 0.2 and 0.2 between chunks
    assert values["mean_itl_ms"] == pytest.approx(500 / 3)
    assert values["mean_e2el_ms"] == pytest.approx(500)


def test_a_single_token_has_no_tpot_and_no_itl() -> None:
    values = measure(complete(0.1))
    assert values["mean_ttft_ms"] == pytest.approx(100)
    assert values["mean_tpot_ms"] is None
    assert values["p99_itl_ms"] is None
    assert measure(complete(0.1), complete(0.1, 0.3))["mean_tpot_ms"] == pytest.approx(200)


def test_failed_requests_count_only_as_failed() -> None:
    values = measure(complete(0.1, 0.2), fail("timeout"), fail("http_429"))
    assert (values["completed"], values["failed"]) == (1, 2)
    assert values["request_throughput"] == 0.5
    assert values["mean_e2el_ms"] == pytest.approx(200)


@pytest.mark.parametrize("requests", [(), (fail("timeout"),)])
def test_without_a_completed_request_nothing_is_measured(
    requests: tuple[RequestRecord, ...],
) -> None:
    values = measure(*requests, options=MetricOptions(goodput={"ttft": 1.0}))
    assert values["output_throughput"] == 0
    assert values["request_goodput"] == 0
    assert values["median_ttft_ms"] is values["p50_e2el_ms"] is values["total_input_tokens"] is None


def test_a_server_without_token_counts_of_prompts_has_no_input_tokens() -> None:
    values = measure(complete(0.1, 0.2, prompt=None))
    assert values["total_input_tokens"] is values["total_cached_tokens"] is None
    assert values["total_token_throughput"] == values["output_throughput"] == 1.0


def test_goodput_counts_requests_that_meet_all_objectives() -> None:
    fast, slow_start = complete(0.1, 0.12), complete(0.5, 0.52)
    slow_decode = complete(0.1, 0.9)
    values = measure(
        fast, slow_start, slow_decode, options=MetricOptions(goodput={"ttft": 0.2, "tpot": 0.05})
    )
    assert values["request_goodput"] == 0.5
    assert measure(fast)["request_goodput"] is None


def test_an_objective_includes_its_limit_and_one_token_meets_any_tpot() -> None:
    assert is_good(complete(0.2), {"ttft": 0.2, "tpot": 0.001, "e2el": 0.2})
    assert not is_good(complete(0.2), {"e2el": 0.19})


def test_the_peak_concurrency_does_not_count_requests_that_only_touch() -> None:
    touching = (complete(1.0), complete(1.0, sent=1.0))
    assert measure(*touching)["max_concurrent_requests"] == 1
    assert measure(*touching, complete(1.0, sent=0.5))["max_concurrent_requests"] == 2
    assert measure()["max_concurrent_requests"] == 0


def test_a_response_that_the_model_ended_is_early() -> None:
    values = measure(complete(0.1, finish="stop"), complete(0.1, finish="length"))
    assert values["ended_early"] == 1


def test_the_client_measures_itself() -> None:
    load = LoadRecord(requests=(), duration=2.0, cpu_seconds=0.5, lag=(0.001, 0.003), cancelled=3)
    values = compute_metrics(load, MetricOptions())
    assert values["client_cpu_share"] == 0.25
    assert values["client_lag_p99_ms"] == pytest.approx(2.98)
    assert values["cancelled"] == 3


def test_percentiles_are_named_by_their_number() -> None:
    values = measure(complete(0.1), options=MetricOptions(percentiles=(99.9,)))
    assert "p99.9_ttft_ms" in values
    assert "p99_ttft_ms" not in values


def test_errors_are_counted_by_kind_with_their_first_message() -> None:
    requests = [fail("timeout", "a"), fail("http_429", "b"), fail("http_429", "c")]
    assert count_errors([*requests, complete(0.1)]) == {
        "http_429": (2, "b"),
        "timeout": (1, "a"),
    }
    assert list(count_errors(requests)) == ["http_429", "timeout"]


def test_rounds_are_combined_by_medians_and_counts_are_added_up() -> None:
    rounds = [{"completed": n, "mean_ttft_ms": ms} for n, ms in ((1, 5.0), (2, 9.0), (3, 6.0))]
    assert combine_rounds(rounds) == {"completed": 6, "mean_ttft_ms": 6.0}
    assert combine_rounds([{"mean_tpot_ms": None}, {"mean_tpot_ms": 3.0}]) == {"mean_tpot_ms": 3.0}
    assert combine_rounds([{"mean_tpot_ms": None}]) == {"mean_tpot_ms": None}


def test_a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians() -> None:
    a = [{"output_throughput": rate} for rate in (10.0, 30.0, 200.0)]
    b = [{"output_throughput": rate} for rate in (10.0, 20.0, 400.0)]
    assert compute_ratios(a, b) == {"output_throughput": 1.0}


def test_a_ratio_uses_the_rounds_that_both_servers_completed() -> None:
    a: list[Values] = [{"completed": 1, "x": 4.0}, {"completed": 1, "x": 9.0}]
    assert compute_ratios(a, [{"completed": 1, "x": 2.0}]) == {"x": 2.0}
    assert compute_ratios(a, [{"x": None}]) == {"x": None}
    assert compute_ratios(a, [{"x": 0.0}]) == {"x": None}


def test_the_standard_deviation_is_that_of_the_population() -> None:
    values = measure(complete(0.1), complete(0.2), complete(0.6))
    assert values["std_ttft_ms"] == pytest.approx(1000 * statistics.pstdev([0.1, 0.2, 0.6]))
