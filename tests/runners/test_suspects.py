"""Prompts that stood by when a runner died."""

from dataclasses import replace

from app.core.embeddings import EmbedJob
from app.core.requests import Lark, Regex, Sampling
from app.runners.suspects import GUILTY, WEIGHTS, Suspects
from tests.runners.scripted import job


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_job_is_counted_once_per_death_however_often_it_ran():
    suspects = Suspects(Clock())
    suspects.accuse([job("x", 1, 2), job("y", 1, 2), job("z", 3)], weight=WEIGHTS["fault"])
    suspects.accuse([job("x", 1, 2)], weight=WEIGHTS["fault"])
    assert [suspects.record(job("?", *ids)).deaths for ids in ((1, 2), (3,), (4,))] == [2, 1, 0]


def test_what_counts_is_what_is_evaluated_not_how_the_answer_is_drawn():
    suspects, one = Suspects(Clock()), job("x", 1, 2)
    suspects.accuse([one], weight=WEIGHTS["fault"])
    hot = replace(one, id="y", sampling=Sampling(temperature=2.0, seed=7), max_tokens=9)
    assert suspects.record(hot).deaths == 1
    assert suspects.record(replace(one, grammar=Regex(pattern="a"))).deaths == 0
    assert suspects.record(replace(one, grammar=Lark(text="\udcff"))).deaths == 0


def test_inputs_of_a_vector_are_not_run_together():
    suspects = Suspects(Clock())
    suspects.accuse(
        [EmbedJob(id="x", inputs=((1, 2), (3,)), pooling="mean")], weight=WEIGHTS["fault"]
    )
    for inputs, deaths in ((((1, 2), (3,)), 1), (((1,), (2, 3)), 0), (((1, 2, 3),), 0)):
        assert suspects.record(EmbedJob(id="y", inputs=inputs, pooling="mean")).deaths == deaths
    assert suspects.record(EmbedJob(id="y", inputs=((1, 2), (3,)), pooling="last")).deaths == 0


def test_a_good_end_clears_a_job_and_an_operator_clears_all():
    suspects = Suspects(Clock())
    suspects.accuse([job("x", 1), job("y", 2), job("z", 3)], weight=WEIGHTS["fault"])
    suspects.clear(job("?", 1))
    assert [suspects.record(job("?", id_)).deaths for id_ in (1, 2, 3)] == [0, 1, 1]
    suspects.clear_all()
    assert [suspects.record(job("?", id_)).deaths for id_ in (1, 2, 3)] == [0, 0, 0]


def test_deaths_are_forgotten_after_a_while_which_each_one_begins_again():
    clock = Clock()
    suspects = Suspects(clock, forgotten_after=10.0)
    suspects.accuse([job("x", 1), job("y", 2)], weight=WEIGHTS["fault"])
    clock.now = 6.0
    suspects.accuse([job("x", 1)], weight=WEIGHTS["fault"])
    clock.now = 12.0
    assert [suspects.record(job("?", id_)).deaths for id_ in (1, 2)] == [2, 0]
    clock.now = 17.0
    assert suspects.record(job("?", 1)).deaths == 0


def test_only_the_latest_ones_are_remembered():
    suspects = Suspects(Clock(), most=2)
    for id_ in (1, 2, 1, 3):
        suspects.accuse([job("x", id_)], weight=WEIGHTS["fault"])
    assert [suspects.record(job("?", id_)).deaths for id_ in (1, 2, 3)] == [2, 0, 1]


def test_deaths_of_unknown_cause_weigh_less_than_faults():
    """Two SIGKILLs of an operator made an innocent prompt one that was refused. Memory that runs
    out sends the same signal, so a prompt is not free of suspicion either."""
    suspects = Suspects(Clock())
    for _ in range(5):
        suspects.accuse([job("x", 1)], weight=WEIGHTS["unknown"])
    assert 0 < suspects.record(job("x", 1)).weight < GUILTY
    suspects.accuse([job("x", 1)], weight=WEIGHTS["unknown"])
    assert suspects.record(job("x", 1)).weight >= GUILTY
    for _ in range(2):
        suspects.accuse([job("y", 2)], weight=WEIGHTS["fault"])
    assert suspects.record(job("y", 2)).weight >= GUILTY
