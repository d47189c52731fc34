"""Crash records: prompts that ran when a runner crashed."""

from dataclasses import replace

from app.core.requests import EmbedJob, LarkGrammar, Regex
from app.core.sampling_params import SamplingParams
from app.runners.quarantine import CRASH_WEIGHTS, REFUSE_WEIGHT, CrashRecords
from tests.runners.scripted import job


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_job_is_counted_once_per_crash():
    records = CrashRecords(Clock())
    records.add_crash([job("x", 1, 2), job("y", 1, 2), job("z", 3)], weight=CRASH_WEIGHTS["fault"])
    records.add_crash([job("x", 1, 2)], weight=CRASH_WEIGHTS["fault"])
    assert [records.get(job("?", *ids)).crashes for ids in ((1, 2), (3,), (4,))] == [2, 1, 0]


def test_jobs_are_identified_by_their_prompt_not_by_sampling():
    records, one = CrashRecords(Clock()), job("x", 1, 2)
    records.add_crash([one], weight=CRASH_WEIGHTS["fault"])
    hot = replace(one, id="y", sampling=SamplingParams(temperature=2.0, seed=7), max_tokens=9)
    assert records.get(hot).crashes == 1
    assert records.get(replace(one, grammar=Regex(pattern="a"))).crashes == 0
    assert records.get(replace(one, grammar=LarkGrammar(text="\udcff"))).crashes == 0


def test_embedding_inputs_are_not_concatenated():
    records = CrashRecords(Clock())
    records.add_crash(
        [EmbedJob(id="x", inputs=((1, 2), (3,)), pooling="mean")], weight=CRASH_WEIGHTS["fault"]
    )
    for inputs, expected in ((((1, 2), (3,)), 1), (((1,), (2, 3)), 0), (((1, 2, 3),), 0)):
        assert records.get(EmbedJob(id="y", inputs=inputs, pooling="mean")).crashes == expected
    assert records.get(EmbedJob(id="y", inputs=((1, 2), (3,)), pooling="last")).crashes == 0


def test_a_successful_end_clears_a_job_and_an_operator_clears_all():
    records = CrashRecords(Clock())
    records.add_crash([job("x", 1), job("y", 2), job("z", 3)], weight=CRASH_WEIGHTS["fault"])
    records.clear(job("?", 1))
    assert [records.get(job("?", id_)).crashes for id_ in (1, 2, 3)] == [0, 1, 1]
    records.clear_all()
    assert [records.get(job("?", id_)).crashes for id_ in (1, 2, 3)] == [0, 0, 0]


def test_crashes_expire_and_each_crash_renews_the_record():
    clock = Clock()
    records = CrashRecords(clock, ttl=10.0)
    records.add_crash([job("x", 1), job("y", 2)], weight=CRASH_WEIGHTS["fault"])
    clock.now = 6.0
    records.add_crash([job("x", 1)], weight=CRASH_WEIGHTS["fault"])
    clock.now = 12.0
    assert [records.get(job("?", id_)).crashes for id_ in (1, 2)] == [2, 0]
    clock.now = 17.0
    assert records.get(job("?", 1)).crashes == 0


def test_only_the_latest_records_are_kept():
    records = CrashRecords(Clock(), max_records=2)
    for id_ in (1, 2, 1, 3):
        records.add_crash([job("x", id_)], weight=CRASH_WEIGHTS["fault"])
    assert [records.get(job("?", id_)).crashes for id_ in (1, 2, 3)] == [2, 0, 1]


def test_crashes_of_unknown_cause_weigh_less_than_faults():
    """After two SIGKILLs of an operator, a prompt that had not caused them was refused. The OOM
    killer sends the same signal, so such a crash is also counted."""
    records = CrashRecords(Clock())
    for _ in range(5):
        records.add_crash([job("x", 1)], weight=CRASH_WEIGHTS["unknown"])
    assert 0 < records.get(job("x", 1)).weight < REFUSE_WEIGHT
    records.add_crash([job("x", 1)], weight=CRASH_WEIGHTS["unknown"])
    assert records.get(job("x", 1)).weight >= REFUSE_WEIGHT
    for _ in range(2):
        records.add_crash([job("y", 2)], weight=CRASH_WEIGHTS["fault"])
    assert records.get(job("y", 2)).weight >= REFUSE_WEIGHT
