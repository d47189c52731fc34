"""What must hold of a run, whatever happened in it. Pure: a report goes in, complaints come out."""

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.load import Outcome
from tests.chaos.processes import ProcessResources
from tests.chaos.questions import Answers

# errors that the faults may bring about, and what each must say for whoever reads it
ERROR_CAUSES = {
    "engine_error": r"killed by|exit status|sent nothing|no progress|closed its connection|"
    r"being unloaded|memory",
    # the last two: the system's words where it has no memory for a thread, or for a library
    "bad_model_files": r"killed by|exit status|memory|no progress|temporarily unavailable|"
    r"failed to map",
    "runner_crashed": r"killed by|exit status|memory",
    "model_loading": r"load|memory",
    "server_busy": r"busy|too many",
    "prompt_refused": r"failed \d+ times",
}

# bytes that the front door may have grown by, whatever it went through
MAX_RSS_GROWTH = 64 << 20

# the logger that passes on what runners write
_RUNNER_LOGGER = "app.runners.child_process"

# threads that asyncio's pool may have grown by
MAX_THREAD_GROWTH = 32


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """outcomes: during the chaos. afterwards: every question once, when all was quiet again.
    before, after: of the front door, idle and with no model loaded. orphan_pids: processes that
    outlived it. exit_status: it ended with. faults: that happened, by name."""

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
    """One sentence each; none where all is well."""
    found = [said for one in report.outcomes if (said := _check_outcome(one, expected))]
    for one in report.afterwards:
        said = _check_outcome(one, expected)
        if said is None and one.text is None:
            said = (
                f"{_describe_outcome(one)} got no answer after the faults had ended: "
                f"{one.code}, {one.message}"
            )
        found += [said] if said else []
    if not any(outcome.text is not None for outcome in report.outcomes):
        found.append("no request was answered")
    found += _find_leaks(report)
    if report.orphan_pids:
        found.append(f"processes that outlived the server: {list(report.orphan_pids)}")
    if report.exit_status not in (0, -signal.SIGTERM):
        found.append(f"the server ended with status {report.exit_status}")
    # what a runner writes that is being killed is its own affair
    log = "".join(line for line in report.log.splitlines(True) if _RUNNER_LOGGER not in line)
    if "Traceback" in log:
        found.append(f"a traceback: {log[log.index('Traceback') :][:4000]}")
    return found


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
    found: list[str] = []
    more = Counter(after.descriptors) - Counter(before.descriptors)
    if more:
        found.append(f"descriptors left open: {dict(more)}")
    if after.rss - before.rss > MAX_RSS_GROWTH:
        found.append(f"memory grew from {before.rss >> 20} to {after.rss >> 20} MiB")
    if after.threads - before.threads > MAX_THREAD_GROWTH:
        found.append(f"threads grew from {before.threads} to {after.threads}")
    return found


def _describe_outcome(outcome: Outcome) -> str:
    question, way = outcome.question, "streamed" if outcome.streamed else "whole"
    return f"{question.model}, {question.prompt[:20]!r}, seed {question.seed}, {way},"


def _outcome_kind(outcome: Outcome) -> str:
    if outcome.disconnected:
        return "disconnected"
    if outcome.failure is not None:
        return "broken"
    return "answered" if outcome.text is not None else str(outcome.code)
