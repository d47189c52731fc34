"""Prompts that stood by when a runner died."""

from dataclasses import replace

from app.core.embeddings import EmbedJob
from app.core.requests import Lark, Regex, Sampling
from app.runners.suspects import Suspects
from tests.runners.scripted import job


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_job_is_counted_once_per_death_however_often_it_ran():
    suspects = Suspects(Clock())
    suspects.accuse([job("x", 1, 2), job("y", 1, 2), job("z", 3)])
    suspects.accuse([job("x", 1, 2)])
    assert [suspects.deaths(job("?", *ids)) for ids in ((1, 2), (3,), (4,))] == [2, 1, 0]


def test_what_counts_is_what_is_evaluated_not_how_the_answer_is_drawn():
    suspects, one = Suspects(Clock()), job("x", 1, 2)
    suspects.accuse([one])
    hot = replace(one, id="y", sampling=Sampling(temperature=2.0, seed=7), max_tokens=9)
    assert suspects.deaths(hot) == 1
    assert suspects.deaths(replace(one, grammar=Regex(pattern="a"))) == 0
    assert suspects.deaths(replace(one, grammar=Lark(text="\udcff"))) == 0, "no text is too odd"


def test_inputs_of_a_vector_are_not_run_together():
    suspects = Suspects(Clock())
    suspects.accuse([EmbedJob(id="x", inputs=((1, 2), (3,)), pooling="mean")])
    for inputs, deaths in ((((1, 2), (3,)), 1), (((1,), (2, 3)), 0), (((1, 2, 3),), 0)):
        assert suspects.deaths(EmbedJob(id="y", inputs=inputs, pooling="mean")) == deaths
    assert suspects.deaths(EmbedJob(id="y", inputs=((1, 2), (3,)), pooling="last")) == 0


def test_a_good_end_clears_a_job_and_an_operator_clears_all():
    suspects = Suspects(Clock())
    suspects.accuse([job("x", 1), job("y", 2), job("z", 3)])
    suspects.clear(job("?", 1))
    assert [suspects.deaths(job("?", id_)) for id_ in (1, 2, 3)] == [0, 1, 1]
    suspects.clear_all()
    assert [suspects.deaths(job("?", id_)) for id_ in (1, 2, 3)] == [0, 0, 0]


def test_deaths_are_forgotten_after_a_while_which_each_one_begins_again():
    clock = Clock()
    suspects = Suspects(clock, forgotten_after=10.0)
    suspects.accuse([job("x", 1), job("y", 2)])
    clock.now = 6.0
    suspects.accuse([job("x", 1)])
    clock.now = 12.0
    assert [suspects.deaths(job("?", id_)) for id_ in (1, 2)] == [2, 0]
    clock.now = 17.0
    assert suspects.deaths(job("?", 1)) == 0


def test_only_the_latest_ones_are_remembered():
    suspects = Suspects(Clock(), most=2)
    for id_ in (1, 2, 1, 3):
        suspects.accuse([job("x", id_)])
    assert [suspects.deaths(job("?", id_)) for id_ in (1, 2, 3)] == [2, 0, 1]
