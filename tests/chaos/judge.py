"""What must hold of a run, whatever happened in it. Pure: a report goes in, complaints come out."""

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.load import Outcome
from tests.chaos.machine import Resources
from tests.chaos.questions import Answers

# errors that the faults may bring about, and what each must say for whoever reads it
CAUSES = {
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
MOST_GROWTH = 64 << 20

# the logger that passes on what runners write
_RUNNERS = "app.runners.spawned"

# threads that asyncio's pool may have grown by
MOST_THREADS = 32


@dataclass(frozen=True, kw_only=True)
class Report:
    """asked: during the chaos. afterwards: every question once, when all was quiet again. before,
    after: of the front door, idle and with no model loaded. orphans: processes that outlived it.
    status: it ended with. faults: that happened, by name."""

    asked: Sequence[Outcome]
    afterwards: Sequence[Outcome]
    before: Resources
    after: Resources
    orphans: Sequence[int]
    status: int
    faults: Counter[str]
    log: str

    def counts(self) -> dict[str, int]:
        kinds = Counter(_kind(outcome) for outcome in self.asked)
        return dict(sorted(kinds.items()))


def complaints(report: Report, expected: Answers) -> list[str]:
    """One sentence each; none where all is well."""
    found = [said for one in report.asked if (said := _wrong(one, expected))]
    for one in report.afterwards:
        said = _wrong(one, expected)
        if said is None and one.text is None:
            said = (
                f"{_named(one)} got no answer after the faults had ended: {one.code}, {one.message}"
            )
        found += [said] if said else []
    if not any(outcome.text is not None for outcome in report.asked):
        found.append("no request was answered")
    found += _leaks(report)
    if report.orphans:
        found.append(f"processes that outlived the server: {list(report.orphans)}")
    if report.status not in (0, -signal.SIGTERM):
        found.append(f"the server ended with status {report.status}")
    # what a runner writes that is being killed is its own affair
    log = "".join(line for line in report.log.splitlines(True) if _RUNNERS not in line)
    if "Traceback" in log:
        found.append(f"a traceback: {log[log.index('Traceback') :][:4000]}")
    return found


def _wrong(outcome: Outcome, expected: Answers) -> str | None:
    if outcome.left:
        return None
    if outcome.broken is not None:
        return f"{_named(outcome)} ended in {outcome.broken}"
    if outcome.text is not None:
        return _wrong_text(outcome, expected)
    cause = CAUSES.get(outcome.code or "")
    if cause is None:
        return f"{_named(outcome)} got {outcome.code}, which no fault explains"
    if not re.search(cause, outcome.message or ""):
        return (
            f"{_named(outcome)} got {outcome.code} with no cause in the message: {outcome.message}"
        )
    return None


def _wrong_text(outcome: Outcome, expected: Answers) -> str | None:
    question = outcome.question
    if outcome.text == expected[question]:
        return None
    for other, text in expected.items():
        if text == outcome.text and other.prompt == question.prompt:
            return f"{_named(outcome)} got the answer of {other.model} (seed {other.seed})"
    return f"{_named(outcome)} got {outcome.text!r}, expected {expected[question]!r}"


def _leaks(report: Report) -> list[str]:
    before, after = report.before, report.after
    found: list[str] = []
    more = Counter(after.descriptors) - Counter(before.descriptors)
    if more:
        found.append(f"descriptors left open: {dict(more)}")
    if after.rss - before.rss > MOST_GROWTH:
        found.append(f"memory grew from {before.rss >> 20} to {after.rss >> 20} MiB")
    if after.threads - before.threads > MOST_THREADS:
        found.append(f"threads grew from {before.threads} to {after.threads}")
    return found


def _named(outcome: Outcome) -> str:
    question, way = outcome.question, "streamed" if outcome.streamed else "whole"
    return f"{question.model}, {question.prompt[:20]!r}, seed {question.seed}, {way},"


def _kind(outcome: Outcome) -> str:
    if outcome.left:
        return "disconnected"
    if outcome.broken is not None:
        return "broken"
    return "answered" if outcome.text is not None else str(outcome.code)
