"""Evaluates answers: reads a list of questions, asks them, and reports which answers contain the
fact.

Knows: questions and patterns. Must not know: how an answer is generated; the caller passes a
function from a question to its answer, for a model in this process or for a server.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = Path(__file__).resolve().with_name("questions.json")
BUILTIN = Path(__file__).resolve().parents[2] / "models/builtin"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalQuestion:
    """A question with its expected answer. must: patterns that a correct answer must match. never:
    patterns that it must not match. Patterns are searched anywhere in the answer, ignoring case."""

    id: str
    ability: str
    question: str
    must: tuple[str, ...]
    never: tuple[str, ...]

    def accepts(self, answer: str) -> bool:
        def found(pattern: str) -> bool:
            return re.search(pattern, answer, re.IGNORECASE) is not None

        return all(map(found, self.must)) and not any(map(found, self.never))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    question: EvalQuestion
    answer: str
    right: bool


def load_questions(path: Path) -> tuple[EvalQuestion, ...]:
    """Reads the questions from a JSON list."""
    return tuple(
        EvalQuestion(
            id=entry["id"],
            ability=entry["ability"],
            question=entry["question"],
            must=tuple(entry["must"]),
            never=tuple(entry["never"]),
        )
        for entry in json.loads(path.read_text(encoding="utf-8"))
    )


def evaluate(
    answer: Callable[[str], str], questions: Sequence[EvalQuestion]
) -> tuple[EvalResult, ...]:
    """Passes each question to `answer`, in order, and checks the result."""
    results: list[EvalResult] = []
    for question in questions:
        said = answer(question.question).strip()
        results.append(EvalResult(question=question, answer=said, right=question.accepts(said)))
    return tuple(results)


def format_report(results: Sequence[EvalResult]) -> str:
    """Returns a text report with every question, its answer and the verdict, followed by totals by
    ability."""
    lines: list[str] = []
    for result in results:
        verdict = "right" if result.right else "WRONG"
        lines += [f"[{verdict}] {result.question.question}", f"        {result.answer}"]
    lines.append("")
    for ability in dict.fromkeys(result.question.ability for result in results):
        verdicts = [result.right for result in results if result.question.ability == ability]
        lines.append(f"{ability}: {sum(verdicts)} of {len(verdicts)}")
    lines.append(f"all: {sum(result.right for result in results)} of {len(results)}")
    return "\n".join(lines)


def format_markdown_table(results: Sequence[EvalResult]) -> str:
    """Returns the report as a Markdown table."""
    rows = ["| question | answer | right |", "|---|---|---|"]
    for result in results:
        cells = (result.question.question, result.answer, "yes" if result.right else "**no**")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=BUILTIN)
    parser.add_argument("--questions", type=Path, default=HELD_OUT)
    parser.add_argument("--markdown", action="store_true", help="print the table of the model card")
    arguments = parser.parse_args()
    # imported here, because modules that only evaluate, such as the benchmark and the tests, do not
    # need numpy
    from tools.builtin_model.numpy_llama import make_answerer

    results = evaluate(make_answerer(arguments.folder), load_questions(arguments.questions))
    print(format_markdown_table(results) if arguments.markdown else format_report(results))


if __name__ == "__main__":
    main()
