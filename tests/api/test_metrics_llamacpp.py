"""The metrics under llama.cpp's names."""

from dataclasses import replace
from typing import Any

from app.api.metrics.llamacpp import GenerationTimes, LlamaCppMetrics
from app.core.jobs import EngineStats
from app.core.models import ModelState
from tests.api.asgi import send_request
from tests.fakes import HELLO, FakeGenerate

NO_TIME = GenerationTimes(prefill=0.0, decode=0.0, max_tokens=0)


def make_state(**stats: Any) -> ModelState:
    return ModelState(name="m", phase="ready", stats=EngineStats(**stats))


def read(text: str) -> dict[str, float]:
    lines = [line.split(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("llamacpp:"): float(value) for name, value in lines}


def test_they_are_sums_of_all_models_without_labels():
    states = [
        make_state(prefilled_tokens=5, cached_tokens=2, generated_tokens=3, steps=4, running=1),
        make_state(embedded_tokens=7, generated_tokens=1, steps=1, waiting=2),
    ]
    times = GenerationTimes(prefill=0.5, decode=2.0, max_tokens=9)
    values = read(LlamaCppMetrics().render(states, times))
    assert values == {
        "prompt_tokens_total": 12,
        "prompt_tokens_cached_total": 2,
        "prompt_seconds_total": 0.5,
        "tokens_predicted_total": 4,
        "tokens_predicted_seconds_total": 2,
        "n_decode_total": 5,
        "n_tokens_max": 9,
        "spec_decode_num_draft_tokens_total": 0,
        "spec_decode_num_accepted_tokens_total": 0,
        "spec_decode_num_drafts_total": 0,
        "prompt_tokens_seconds": 24,
        "predicted_tokens_seconds": 2,
        "requests_processing": 1,
        "requests_deferred": 2,
        "n_busy_slots_per_decode": 0.8,
    }


def test_rates_are_those_since_the_last_scrape():
    metrics, state = LlamaCppMetrics(), make_state(generated_tokens=10)
    times = replace(NO_TIME, decode=2.0)
    rates = [
        read(metrics.render([state], times))["predicted_tokens_seconds"],
        read(metrics.render([state], times))["predicted_tokens_seconds"],
        read(metrics.render([make_state(generated_tokens=40)], replace(times, decode=3.0)))[
            "predicted_tokens_seconds"
        ],
    ]
    assert rates == [5, 0, 30]


def test_each_family_has_its_type_and_help():
    lines = LlamaCppMetrics().render([], NO_TIME).splitlines()
    for index in range(0, len(lines), 3):
        about, kind, value = lines[index : index + 3]
        name = value.split(" ")[0]
        assert about.startswith(f"# HELP {name} ")
        assert kind in (f"# TYPE {name} counter", f"# TYPE {name} gauge")


def test_they_follow_the_other_metrics_of_a_scrape():
    reply = send_request(FakeGenerate(HELLO), "GET", "/metrics")
    text = reply.body.decode()
    assert "\nllamacpp:requests_processing 2.0\n" in text
    assert int(reply.headers["process-start-time-unix"]) > 0
