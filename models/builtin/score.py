"""Judges answers: reads lists of questions, asks them, says which answers hold the fact.

Knows: questions and patterns. Must not know: how an answer is made; whoever asks brings a function
from a question to its answer, be it a model in this process or a server.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_BACK = Path(__file__).resolve().with_name("questions.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """must: patterns that a right answer matches, all of them. never: patterns of which it matches
    none. Both are searched anywhere in the answer, without regard to case."""

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
class Result:
    question: Question
    answer: str
    right: bool


def questions(path: Path) -> tuple[Question, ...]:
    """The questions in the JSON list at `path`."""
    return tuple(
        Question(
            id=entry["id"],
            ability=entry["ability"],
            question=entry["question"],
            must=tuple(entry["must"]),
            never=tuple(entry["never"]),
        )
        for entry in json.loads(path.read_text(encoding="utf-8"))
    )


def score(answer: Callable[[str], str], asked: Sequence[Question]) -> tuple[Result, ...]:
    """Each question put to `answer`, one after the other, and the verdict."""
    results: list[Result] = []
    for question in asked:
        said = answer(question.question).strip()
        results.append(Result(question=question, answer=said, right=question.accepts(said)))
    return tuple(results)


def report(results: Sequence[Result]) -> str:
    """Lines for people: every question, its answer and the verdict; totals by ability last."""
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


def table(results: Sequence[Result]) -> str:
    """The same in Markdown, as MODEL_CARD.md shows it."""
    rows = ["| question | answer | right |", "|---|---|---|"]
    for result in results:
        cells = (result.question.question, result.answer, "yes" if result.right else "**no**")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HELD_BACK.parent)
    parser.add_argument("--questions", type=Path, default=HELD_BACK)
    parser.add_argument("--markdown", action="store_true", help="print the table of the model card")
    arguments = parser.parse_args()
    # whoever only judges, such as the bench and the tests, needs no numpy
    from models.builtin.reference import answerer

    results = score(answerer(arguments.folder), questions(arguments.questions))
    print(table(results) if arguments.markdown else report(results))


if __name__ == "__main__":
    main()
