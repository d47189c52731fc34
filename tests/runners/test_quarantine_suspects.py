"""Prompts that stood by when a runner died."""

from dataclasses import replace

from app.core.embeddings import EmbedJob
from app.core.requests import LarkGrammar, Regex
from app.core.sampling_params import SamplingParams
from app.runners.quarantine import CRASH_WEIGHTS, REFUSE_WEIGHT, CrashRecords
from tests.runners.scripted import job


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_job_is_counted_once_per_death_however_often_it_ran():
    suspects = CrashRecords(Clock())
    suspects.add_crash([job("x", 1, 2), job("y", 1, 2), job("z", 3)], weight=CRASH_WEIGHTS["fault"])
    suspects.add_crash([job("x", 1, 2)], weight=CRASH_WEIGHTS["fault"])
    assert [suspects.get(job("?", *ids)).crashes for ids in ((1, 2), (3,), (4,))] == [2, 1, 0]


def test_what_counts_is_what_is_evaluated_not_how_the_answer_is_drawn():
    suspects, one = CrashRecords(Clock()), job("x", 1, 2)
    suspects.add_crash([one], weight=CRASH_WEIGHTS["fault"])
    hot = replace(one, id="y", sampling=SamplingParams(temperature=2.0, seed=7), max_tokens=9)
    assert suspects.get(hot).crashes == 1
    assert suspects.get(replace(one, grammar=Regex(pattern="a"))).crashes == 0
    assert suspects.get(replace(one, grammar=LarkGrammar(text="\udcff"))).crashes == 0


def test_inputs_of_a_vector_are_not_run_together():
    suspects = CrashRecords(Clock())
    suspects.add_crash(
        [EmbedJob(id="x", inputs=((1, 2), (3,)), pooling="mean")], weight=CRASH_WEIGHTS["fault"]
    )
    for inputs, deaths in ((((1, 2), (3,)), 1), (((1,), (2, 3)), 0), (((1, 2, 3),), 0)):
        assert suspects.get(EmbedJob(id="y", inputs=inputs, pooling="mean")).crashes == deaths
    assert suspects.get(EmbedJob(id="y", inputs=((1, 2), (3,)), pooling="last")).crashes == 0


def test_a_good_end_clears_a_job_and_an_operator_clears_all():
    suspects = CrashRecords(Clock())
    suspects.add_crash([job("x", 1), job("y", 2), job("z", 3)], weight=CRASH_WEIGHTS["fault"])
    suspects.clear(job("?", 1))
    assert [suspects.get(job("?", id_)).crashes for id_ in (1, 2, 3)] == [0, 1, 1]
    suspects.clear_all()
    assert [suspects.get(job("?", id_)).crashes for id_ in (1, 2, 3)] == [0, 0, 0]


def test_deaths_are_forgotten_after_a_while_which_each_one_begins_again():
    clock = Clock()
    suspects = CrashRecords(clock, ttl=10.0)
    suspects.add_crash([job("x", 1), job("y", 2)], weight=CRASH_WEIGHTS["fault"])
    clock.now = 6.0
    suspects.add_crash([job("x", 1)], weight=CRASH_WEIGHTS["fault"])
    clock.now = 12.0
    assert [suspects.get(job("?", id_)).crashes for id_ in (1, 2)] == [2, 0]
    clock.now = 17.0
    assert suspects.get(job("?", 1)).crashes == 0


def test_only_the_latest_ones_are_remembered():
    suspects = CrashRecords(Clock(), max_records=2)
    for id_ in (1, 2, 1, 3):
        suspects.add_crash([job("x", id_)], weight=CRASH_WEIGHTS["fault"])
    assert [suspects.get(job("?", id_)).crashes for id_ in (1, 2, 3)] == [2, 0, 1]


def test_deaths_of_unknown_cause_weigh_less_than_faults():
    """Two SIGKILLs of an operator made an innocent prompt one that was refused. Memory that runs
    out sends the same signal, so a prompt is not free of suspicion either."""
    suspects = CrashRecords(Clock())
    for _ in range(5):
        suspects.add_crash([job("x", 1)], weight=CRASH_WEIGHTS["unknown"])
    assert 0 < suspects.get(job("x", 1)).weight < REFUSE_WEIGHT
    suspects.add_crash([job("x", 1)], weight=CRASH_WEIGHTS["unknown"])
    assert suspects.get(job("x", 1)).weight >= REFUSE_WEIGHT
    for _ in range(2):
        suspects.add_crash([job("y", 2)], weight=CRASH_WEIGHTS["fault"])
    assert suspects.get(job("y", 2)).weight >= REFUSE_WEIGHT
