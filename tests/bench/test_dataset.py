"""The prompts of a load, and the format of trace files."""

import json
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import pytest

from app.bench.dataset import (
    BenchPrompt,
    Dataset,
    FixedDataset,
    PromptLength,
    RandomDataset,
    Session,
    TraceDataset,
    make_words,
    read_trace,
)
from app.core.errors import AppError

LENGTH = PromptLength(tokens_per_word=2.0, template_tokens=10.0)
TEMPLATE = PromptLength(template_tokens=4.0)
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "u2"},
    {"role": "assistant", "content": "a2"},
    {"role": "tool", "content": "t"},
]


def take(
    dataset: Dataset, count: int, *, label: str = "1", length: PromptLength = LENGTH
) -> list[Session]:
    return list(islice(dataset.make_sessions(label, "seed", length), count))


def texts(sessions: list[Session]) -> list[str]:
    return [prompt.text for session in sessions for prompt in session.prompts]


def write_trace(folder: Path, *rows: dict[str, Any] | str) -> Path:
    file = folder / "trace.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def load_trace(folder: Path, *rows: dict[str, Any], **options: float) -> TraceDataset:
    return TraceDataset(rows=read_trace(write_trace(folder, *rows)), **options)


def common_words(a: str, b: str) -> int:
    pairs = list(zip(a.split(), b.split(), strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def test_random_prompts_have_the_length_and_differ_from_their_first_words_on() -> None:
    prompts = texts(take(RandomDataset(input_len=210), 20))
    assert {len(prompt.split()) for prompt in prompts} == {100}
    assert max(common_words(a, b) for a, b in combinations(prompts, 2)) < 5


def test_random_prompts_depend_on_the_label_and_the_seed_only() -> None:
    dataset = RandomDataset(input_len=100)
    assert take(dataset, 3) == take(dataset, 3)
    assert set(texts(take(dataset, 3))).isdisjoint(texts(take(dataset, 3, label="2")))


def test_a_shared_prefix_is_the_same_for_all_labels_and_adds_to_the_length() -> None:
    dataset = RandomDataset(input_len=110, prefix_len=80)
    first, second = texts(take(dataset, 2))
    [other] = texts(take(dataset, 1, label="2"))
    assert len(first.split()) == 90
    assert 40 <= common_words(first, second) < 45
    assert 40 <= common_words(first, other) < 45


def test_a_prompt_has_at_least_one_word() -> None:
    [prompt] = texts(take(RandomDataset(input_len=3), 1))
    assert len(prompt.split()) == 1


def test_fixed_prompts_repeat_unchanged() -> None:
    assert texts(take(FixedDataset(texts=("a", "b")), 5)) == ["a", "b", "a", "b", "a"]


def test_a_row_with_a_prompt(tmp_path: Path) -> None:
    dataset = load_trace(tmp_path, {"prompt": "p", "output_tokens": 7}, {"prompt": "q"})
    first, second = take(dataset, 9)
    assert first.prompts == (BenchPrompt(text="p", output_tokens=7),)
    assert (second.prompts, second.arrival) == ((BenchPrompt(text="q"),), None)
    assert not dataset.is_timed


def test_a_conversation_has_a_request_per_assistant_message_and_one_at_its_end(
    tmp_path: Path,
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"messages": MESSAGES, "tools": tools, "max_tokens": 5}
    [session] = take(load_trace(tmp_path, row), 9)
    assert [len(prompt.messages) for prompt in session.prompts] == [2, 4, 6]
    assert {prompt.output_tokens for prompt in session.prompts} == {5}
    assert session.prompts[0].tools == tuple(tools)


def test_a_recorded_last_answer_is_not_sent(tmp_path: Path) -> None:
    [session] = take(load_trace(tmp_path, {"messages": MESSAGES[:3]}), 9)
    assert [len(prompt.messages) for prompt in session.prompts] == [2]


def test_times_begin_at_the_first_row_and_scale(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "timestamp": time} for time in (5000, 6000, 9000)]
    dataset = load_trace(tmp_path, *rows, speed=2.0)
    assert [session.arrival for session in take(dataset, 9)] == [0.0, 0.5, 2.0]
    assert dataset.is_timed
    ignored = load_trace(tmp_path, *rows, speed=float("inf"))
    assert [session.arrival for session in take(ignored, 9)] == [0.0, 0.0, 0.0]
    assert not ignored.is_timed


def test_equal_hash_ids_are_equal_text(tmp_path: Path) -> None:
    rows = [
        {"input_length": 1200, "output_length": 30, "hash_ids": [7, 8, 9]},
        {"input_length": 1100, "hash_ids": [7, 8, 10]},
        {"input_length": 600, "hash_ids": [11, 8]},
        {"input_length": 100},
    ]
    dataset = load_trace(tmp_path, *rows)
    a, b, c, d = texts(take(dataset, 9, length=TEMPLATE))
    assert [len(text.split()) for text in (a, b, c, d)] == [1196, 1096, 596, 96]
    assert 1024 <= common_words(a, b) < 1034
    assert common_words(a, c) < 10
    assert a.split()[512:596] == c.split()[512:596]
    # each round uses different texts, which the server has not cached
    assert common_words(a, texts(take(dataset, 1, label="2", length=TEMPLATE))[0]) < 10


def test_lengths_scale(tmp_path: Path) -> None:
    row = {"input_length": 1000, "output_length": 30, "hash_ids": [1, 2]}
    [session] = take(load_trace(tmp_path, row, length_scale=0.1), 9, length=PromptLength())
    [prompt] = session.prompts
    assert (len(prompt.text.split()), prompt.output_tokens) == (100, 3)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("nonsense", "line 2: Expecting value"),
        ("[1]", "line 2: not a JSON object"),
        ({"text": "x"}, "line 2: a request needs prompt, messages or input_length"),
        ({"prompt": 1}, "line 2: prompt is not a string"),
        ({"prompt": ""}, "line 2: prompt is not a string"),
        ({"messages": "x"}, "line 2: messages is not a list of objects"),
        ({"messages": [1]}, "line 2: messages is not a list of objects"),
        ({"messages": MESSAGES, "tools": 1}, "line 2: tools is not a list of objects"),
        ({"input_length": "9"}, "line 2: input_length is not a number"),
        ({"input_length": True}, "line 2: input_length is not a number"),
        ({"input_length": -1}, "line 2: input_length is negative or not finite"),
        ('{"prompt": "p", "timestamp": NaN}', "line 2: timestamp is negative or not finite"),
        ({"input_length": 9, "hash_ids": ["a"]}, "line 2: hash_ids is not a list of integers"),
    ],
)
def test_an_invalid_row_is_rejected_with_its_line(
    row: dict[str, Any] | str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(AppError, match=reason):
        read_trace(write_trace(tmp_path, {"prompt": "p"}, row))


def test_an_empty_file_and_another_encoding_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(AppError, match="has no requests"):
        read_trace(write_trace(tmp_path, "", " "))
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(AppError, match="is not UTF-8 text"):
        read_trace(tmp_path / "latin")


def test_recorded_traces_are_accepted(shared: Path) -> None:
    """Mooncake's traces, and conversations of tau-bench and SWE-agent."""
    traces = shared / "traces"
    mooncake = TraceDataset(rows=read_trace(traces / "mooncake_conversation_trace.jsonl"))
    assert (len(mooncake.rows), mooncake.is_timed) == (12_031, True)
    first, second = texts(take(mooncake, 2, length=PromptLength()))
    assert (len(first.split()), len(second.split())) == (6758, 7322)
    # the first block, the system prompt
    assert 512 <= common_words(first, second) < 522
    airline = take(TraceDataset(rows=read_trace(traces / "tau_airline_conversations.jsonl")), 99)
    assert len(airline) == 50
    assert all(session.prompts for session in airline)


def test_words_depend_on_the_label() -> None:
    assert make_words("a", 9) == make_words("a", 9) != make_words("b", 9)
