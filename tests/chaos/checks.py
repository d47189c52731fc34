"""The invariants of a run. Pure functions: a report in, violations out."""

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.load import Outcome
from tests.chaos.processes import ProcessResources
from tests.chaos.questions import Answers

# errors that the faults may cause, and the causes that each message must name
ERROR_CAUSES = {
    "engine_error": r"killed by|exit status|sent nothing|no progress|closed its connection|"
    r"being unloaded|memory",
    # the last two: messages of the system without memory for a thread or for a library
    "bad_model_files": r"killed by|exit status|memory|no progress|temporarily unavailable|"
    r"failed to map",
    "runner_crashed": r"killed by|exit status|memory",
    "model_loading": r"load|memory",
    "server_busy": r"busy|too many",
    "prompt_refused": r"failed \d+ times",
}

# maximum growth of the server process in bytes
MAX_RSS_GROWTH = 64 << 20

# the logger that forwards the output of runners
_RUNNER_LOGGER = "app.runners.child_process"

# maximum growth of asyncio's thread pool
MAX_THREAD_GROWTH = 32


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """outcomes: during the faults. afterwards: every question once, after the faults. before,
    after: of the idle server process with no model loaded. orphan_pids: processes that outlived the
    server. exit_status: of the server. faults: counts by name."""

    outcomes: Sequence[Outcome]
    afterwards: Sequence[Outcome]
    before: ProcessResources
    after: ProcessResources
    orphan_pids: Sequence[int]
    exit_status: int
    faults: Counter[str]
    log: str

    def counts(self) -> dict[str, int]:
        kinds = Counter(_outcome_kind(outcome) for outcome in self.outcomes)
        return dict(sorted(kinds.items()))


def find_violations(report: ChaosReport, expected: Answers) -> list[str]:
    """The violations, one sentence each."""
    violations = [
        violation for each in report.outcomes if (violation := _check_outcome(each, expected))
    ]
    for each in report.afterwards:
        violation = _check_outcome(each, expected)
        if violation is None and each.text is None:
            violation = (
                f"{_describe_outcome(each)} got no answer after the faults had ended: "
                f"{each.code}, {each.message}"
            )
        violations += [violation] if violation else []
    if not any(each.text is not None for each in report.outcomes):
        violations.append("no request was answered")
    violations += _find_leaks(report)
    if report.orphan_pids:
        violations.append(f"processes that outlived the server: {list(report.orphan_pids)}")
    if report.exit_status not in (0, -signal.SIGTERM):
        violations.append(f"the server ended with status {report.exit_status}")
    # the output of killed runners is ignored
    log = "".join(line for line in report.log.splitlines(True) if _RUNNER_LOGGER not in line)
    if "Traceback" in log:
        violations.append(f"a traceback: {log[log.index('Traceback') :][:4000]}")
    return violations


def _check_outcome(outcome: Outcome, expected: Answers) -> str | None:
    if outcome.disconnected:
        return None
    if outcome.failure is not None:
        return f"{_describe_outcome(outcome)} ended in {outcome.failure}"
    if outcome.text is not None:
        return _check_text(outcome, expected)
    cause = ERROR_CAUSES.get(outcome.code or "")
    if cause is None:
        return f"{_describe_outcome(outcome)} got {outcome.code}, which no fault explains"
    if not re.search(cause, outcome.message or ""):
        return (
            f"{_describe_outcome(outcome)} got {outcome.code} with no cause in the "
            f"message: {outcome.message}"
        )
    return None


def _check_text(outcome: Outcome, expected: Answers) -> str | None:
    question = outcome.question
    if outcome.text == expected[question]:
        return None
    for other, text in expected.items():
        if text == outcome.text and other.prompt == question.prompt:
            return (
                f"{_describe_outcome(outcome)} got the answer of {other.model} (seed {other.seed})"
            )
    return f"{_describe_outcome(outcome)} got {outcome.text!r}, expected {expected[question]!r}"


def _find_leaks(report: ChaosReport) -> list[str]:
    before, after = report.before, report.after
    leaks: list[str] = []
    leaked = Counter(after.descriptors) - Counter(before.descriptors)
    if leaked:
        leaks.append(f"descriptors left open: {dict(leaked)}")
    if after.rss - before.rss > MAX_RSS_GROWTH:
        leaks.append(f"memory grew from {before.rss >> 20} to {after.rss >> 20} MiB")
    if after.threads - before.threads > MAX_THREAD_GROWTH:
        leaks.append(f"threads grew from {before.threads} to {after.threads}")
    return leaks


def _describe_outcome(outcome: Outcome) -> str:
    question, mode = outcome.question, "streamed" if outcome.streamed else "whole"
    return f"{question.model}, {question.prompt[:20]!r}, seed {question.seed}, {mode},"


def _outcome_kind(outcome: Outcome) -> str:
    if outcome.disconnected:
        return "disconnected"
    if outcome.failure is not None:
        return "broken"
    return "answered" if outcome.text is not None else str(outcome.code)
