"""`mlxrunner prove`: the command, its table and its JSON."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli import main
from app.commands import prove as command
from app.commands.prove import build_body, render_row, render_verdict
from app.core.requests import Conversation, GenerateRequest, JsonSchema, Message
from app.prove.proof import ConditionReport
from tests.commands.run_command import OwnEngines
from tests.engine.test_adapters import write_adapter

PASSED = ConditionReport(name="batched", cause="other rows", detail="8", answers=4, equal=4)
NEAR = replace(
    PASSED,
    name="without kernels",
    equal=3,
    near_ties=1,
    tolerance=0.01,
    largest=4e-5,
    first_difference="conversation 2 (greedy), turn 1, token 3: ID 5 instead of 4",
)
FAILED = replace(
    PASSED,
    name="cached",
    cause="the prefix cache",
    equal=3,
    different=1,
    first_difference="conversation 1 (greedy), turn 2, token 0: ID 7 instead of 6",
)
NOT_RUN = ConditionReport(name="preempted", cause="", detail="needs a context of 550 tokens")


def test_the_built_in_model_passes(
    own_engines: OwnEngines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, with its own server and a process without kernels."""
    monkeypatch.setattr(command, "open_own_server", own_engines.open)
    status = main(["prove", "--conversations", "2", "--json"])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    assert own_engines.ended == [None]
    report = json.loads(out)
    assert (report["passed"], report["model"], report["conversations"]) == (True, "builtin", 2)
    conditions = {one["name"]: one for one in report["conditions"]}
    assert list(conditions) == [
        *("batched", "cached", "batched + cached", "chunked", "preempted"),
        *("without kernels", "streamed"),
    ]
    assert all(one["answers"] for one in report["conditions"])
    # each request with and without `stream`
    assert conditions["streamed"]["answers"] == 2 * report["answers"]
    assert all(one["different"] == 0 for one in conditions.values())


def test_a_model_passes_with_an_adapter(
    own_engines: OwnEngines,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """The server of the condition "streamed" also has the adapter."""
    monkeypatch.setattr(command, "open_own_server", own_engines.open)
    flag = f"x={write_adapter(tmp_path / 'x', 0)}"
    status = main(["prove", str(tiny_model), "--adapter", flag, "--conversations", "2", "--json"])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    conditions = {one["name"]: one for one in json.loads(out)["conditions"]}
    for name in ("batched", "cached", "batched + cached", "streamed"):
        assert conditions[name]["equal"] == conditions[name]["answers"] > 0


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (PASSED, "batched                   4      4         0          0  8"),
        (
            NEAR,
            "without kernels           4      3         1          0  8; differs by up to 4.0e-05",
        ),
        (NOT_RUN, "preempted           not run: needs a context of 550 tokens"),
    ],
)
def test_a_condition_is_one_line(report: ConditionReport, line: str) -> None:
    assert render_row(report) == line


def test_a_difference_fails_and_names_its_place_and_its_cause() -> None:
    lines = list(render_verdict([PASSED, FAILED, NEAR, NOT_RUN], 12))
    assert lines == [
        "",
        "cached (the prefix cache): first difference in conversation 1 (greedy), turn 2, token 0: "
        "ID 7 instead of 6",
        "without kernels (other rows): first near-tie in conversation 2 (greedy), turn 1, token 3: "
        "ID 5 instead of 4",
        "FAILED in 12 s: cached",
    ]


def test_a_condition_that_was_not_run_is_not_said_to_pass() -> None:
    assert list(render_verdict([PASSED, NEAR, NOT_RUN], 12))[-1] == (
        "passed in 12 s: equal bits for batched"
    )
    assert "does not give equal bits" in list(render_verdict([NEAR], 12))[-1]


def test_many_near_ties_fail() -> None:
    assert NEAR.passed
    assert not replace(NEAR, equal=1, near_ties=3).passed
    assert not FAILED.passed
    assert NOT_RUN.passed


def test_the_http_request_has_all_parameters() -> None:
    request = GenerateRequest(
        model="m",
        prompt=Conversation(messages=(Message(role="user", content="hi"),)),
        sampling={"temperature": 0.5, "seed": 3, "logit_bias": ((5, -3.0),)},
        grammar=JsonSchema(text='{"type": "object"}'),
        max_tokens=7,
    )
    body = build_body("m", request)
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.5, 3, 7)
    assert body["logit_bias"] == {"5": -3.0}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "prove needs exactly one model"),
        (["--installed"], "prove needs exactly one model"),
        (["no/such-model"], "no/such-model"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", *arguments]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(rf"mlxrunner: .*{message}.*\n", error), error
