"""The evaluation of the built-in model: questions and verdicts."""

import json
from pathlib import Path

import pytest

from tools.builtin_model.augmentation import normalize
from tools.builtin_model.corpus import generate_corpus
from tools.builtin_model.evaluate import (
    HELD_OUT,
    EvalQuestion,
    evaluate,
    format_markdown_table,
    format_report,
    load_questions,
    main,
)


def test_development_and_held_out_questions_are_disjoint() -> None:
    held_back, development = (
        {normalize(question.question) for question in load_questions(HELD_OUT.with_name(name))}
        for name in ("questions.json", "development.json")
    )
    assert len(held_back) == 50
    assert not held_back & development


def find_question(name: str) -> EvalQuestion:
    return next(question for question in load_questions(HELD_OUT) if question.id == name)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("port", "The default port is 8080."),
        ("models-route", "GET /v1/models lists the models."),
        ("stream", 'Put `"stream": true` into the request.'),
        ("count-4-11", "4, 5, 6, 7, 8, 9, 10, 11"),
        ("countdown-8", "8, 7, 6, 5, 4, 3, 2, 1, 0"),
        ("sum-14-9", "14 plus 9 is 23."),
        ("story-fox", "Once there was a fox. It was red. It ran home. It slept."),
        ("weather", "I cannot see the weather."),
        ("joke", "Why did the cache smile? It remembered."),
    ],
)
def test_a_right_answer_is_accepted(name: str, answer: str) -> None:
    assert find_question(name).accepts(answer)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("port", "The default port is 18080."),
        ("models-route", "Chat requests go to POST /v1/chat/completions."),
        ("tokenize-route", "POST /v1/detokenize turns token ids back into text."),
        ("stream", 'Put `"stream": false` into the request.'),
        ("count-4-11", "4, 5, 6, 7, 9, 10, 11"),
        ("count-4-11", "4, 5, 6, 7, 8, 9, 10, 11, 12"),
        ("count-4-11", "3, 4, 5, 6, 7, 8, 9, 10, 11"),
        ("sum-14-9", "14 plus 9 is 24."),
        ("sum-14-9", "14 plus 9 is 123."),
        ("story-fox", "Once there was a fox. It was red."),
        ("story-fox", "Once there was a dog. It was red. It ran home. It slept."),
        ("weather", "You are welcome!"),
        ("joke", "I cannot tell jokes. Why?"),
    ],
)
def test_a_wrong_answer_is_refused(name: str, answer: str) -> None:
    assert not find_question(name).accepts(answer)


def test_no_single_answer_is_right_for_all_questions() -> None:
    """A model that gives the same long answer to every question must fail."""
    everything = " ".join(
        answer
        for conversation in generate_corpus(1, 300)
        for _, answer in conversation.turns
        if "cannot" not in answer
    )
    # a sum is judged by the last number of the answer, which must not be right by chance
    results = evaluate(lambda _: f"{everything} 40", load_questions(HELD_OUT))
    computed = [result for result in results if result.question.ability in ("count", "sum")]
    assert len(computed) == 9
    assert not any(result.right for result in computed)


def test_score_asks_each_question_once_and_counts() -> None:
    questions: list[str] = []

    def answer(question: str) -> str:
        questions.append(question)
        return "Chat requests go to POST /v1/chat/completions. "

    held_back = load_questions(HELD_OUT)
    results = evaluate(answer, held_back)
    assert questions == [question.question for question in held_back]
    assert [result.question.id for result in results if result.right] == ["chat-route"]
    assert "all: 1 of 50" in format_report(results)
    assert "facts: 1 of 30" in format_report(results)


def test_a_table_keeps_its_columns() -> None:
    results = evaluate(lambda _: "a | b", load_questions(HELD_OUT)[:1])
    assert format_markdown_table(results).splitlines()[2].endswith(" | a \\| b | **no** |")


def test_question_ids_are_unique() -> None:
    ids = [question.id for question in load_questions(HELD_OUT)]
    assert len(set(ids)) == len(ids)


def test_scoring_from_the_command_line_prints_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"id": "x", "ability": "facts", "question": "what is the default port?"}
    asked_file = tmp_path / "asked.json"
    asked_file.write_text(json.dumps([entry | {"must": ["8080"], "never": []}]))
    monkeypatch.setattr("sys.argv", ["score", "--questions", str(asked_file)])
    main()
    printed = capsys.readouterr().out
    assert "[right] what is the default port?" in printed
    assert "all: 1 of 1" in printed
