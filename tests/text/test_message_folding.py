"""Messages that a template would drop, reject or move are joined to a neighbour."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.requests import Message, ToolCall
from app.text.message_folding import PlacementRules, fold_messages

FOLD_ALL = PlacementRules(
    keeps_several_system=False,
    keeps_system_after=frozenset(),
    keeps_user_after_results=False,
    keeps_several_user=False,
)
KEEP_ALL = PlacementRules()

ALL_RULES = [
    PlacementRules(
        keeps_several_system=several,
        keeps_system_after=frozenset(places),
        keeps_user_after_results=user,
        keeps_several_user=alternates,
        keeps_several_assistant=alternates and user,  # the text before a call may be merged
        keeps_text_before_calls=user,
        keeps_text_of_calls=several,
        requires_user_first=not several,
    )
    for several, places, user, alternates in product(
        (True, False), ((), ("user",), ("tool", "assistant")), (True, False), (True, False)
    )
]


def user(text: str) -> Message:
    return Message(role="user", content=text)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def answer(text: str) -> Message:
    return Message(role="assistant", content=text)


def call(*ids: str) -> Message:
    calls = tuple(ToolCall(id=id, name="look", arguments="{}") for id in ids)
    return Message(role="assistant", content=None, tool_calls=calls)


def result(id: str) -> Message:
    return Message(role="tool", content=f"result {id}", tool_call_id=id)


def fold_texts(
    *messages: Message, rules: PlacementRules = FOLD_ALL
) -> list[tuple[str, str | None]]:
    return [(message.role, message.content) for message in fold_messages(messages, rules)]


def test_system_messages_at_the_start_become_one() -> None:
    assert fold_texts(system("A"), system("B"), user("C")) == [("system", "A\n\nB"), ("user", "C")]


def test_a_system_message_after_the_user_is_appended_to_the_message() -> None:
    assert fold_texts(user("A"), system("B"), system("C")) == [("user", "A\n\nB\n\nC")]


def test_a_system_message_after_an_assistant_message_begins_the_next_user_message() -> None:
    assert fold_texts(user("A"), answer("B"), system("C"), user("D")) == [
        ("user", "A"),
        ("assistant", "B"),
        ("user", "C\n\nD"),
    ]


def test_a_system_message_after_the_last_assistant_message_becomes_a_user_message() -> None:
    """It stays there if another answer follows: the next turn must not move it."""
    begun = [("user", "A"), ("assistant", "B"), ("user", "C")]
    assert fold_texts(user("A"), answer("B"), system("C")) == begun
    more = fold_texts(user("A"), answer("B"), system("C"), answer("D"), user("E"))
    assert more == [*begun, ("assistant", "D"), ("user", "E")]


def test_texts_beside_results_are_appended_to_the_last_result() -> None:
    messages = (user("A"), call("1", "2"), result("1"), result("2"), user("B"), system("C"))
    assert fold_texts(*messages)[2:] == [("tool", "result 1"), ("tool", "result 2\n\nB\n\nC")]


def test_nothing_stays_between_a_call_and_its_result() -> None:
    messages = (call("1", "2"), result("1"), system("B"), user("C"), result("2"))
    for rules in (FOLD_ALL, KEEP_ALL):
        roles = [role for role, _ in fold_texts(*messages, rules=rules)]
        assert roles[:3] == ["assistant", "tool", "tool"]


def test_the_order_stays_where_only_the_users_text_is_folded() -> None:
    rules = replace(KEEP_ALL, keeps_user_after_results=False)
    messages = (user("A"), call("1"), result("1"), system("B"), user("C"), system("D"))
    assert fold_texts(*messages, rules=rules)[2:] == [
        ("tool", "result 1\n\nB\n\nC"),
        ("system", "D"),
    ]


def test_the_result_of_a_failed_call_begins_with_error() -> None:
    failed = replace(result("1"), is_error=True)
    assert fold_texts(call("1"), failed)[-1] == ("tool", "Error: result 1")
    failed = replace(failed, content="error 404")
    assert fold_texts(call("1"), failed)[-1] == ("tool", "error 404")


def test_the_system_prompt_moves_to_the_users_last_message_where_it_would_be_dropped() -> None:
    rules = replace(KEEP_ALL, keeps_system_in_tool_loop=False)
    start = (system("A"), user("B"), answer("C"), user("D"))
    assert fold_texts(*start, rules=rules)[0] == ("system", "A")
    assert fold_texts(*start, call("1"), result("1"), rules=rules)[:3] == [
        ("user", "B"),
        ("assistant", "C"),
        ("user", "A\n\nD"),
    ]


def test_assistant_messages_are_merged_where_roles_must_alternate() -> None:
    rules = replace(KEEP_ALL, keeps_several_assistant=False, keeps_text_before_calls=False)
    first = replace(answer("B"), reasoning="R")
    messages = (user("A"), first, answer("C"), call("1"), result("1"), answer("D"))
    folded = fold_messages(messages, rules)
    assert [message.role for message in folded] == ["user", "assistant", "tool", "assistant"]
    assert (folded[1].content, folded[1].reasoning) == ("B\n\nC", "R")
    assert [call.id for call in folded[1].tool_calls] == ["1"]
    before_calls = fold_messages(messages, replace(rules, keeps_text_before_calls=True))
    assert [message.content for message in before_calls[1:3]] == ["B\n\nC", None]


def test_an_empty_user_message_precedes_a_greeting_and_a_system_message_alone() -> None:
    rules = replace(KEEP_ALL, requires_user_first=True)
    assert fold_texts(system("A"), answer("B"), user("C"), rules=rules) == [
        ("system", "A"),
        ("user", ""),
        ("assistant", "B"),
        ("user", "C"),
    ]
    assert fold_texts(system("A"), rules=rules) == [("system", "A"), ("user", "")]
    assert fold_texts(user("A"), rules=rules) == [("user", "A")]
    assert fold_texts(rules=rules) == []


def test_the_text_of_a_call_is_separated_where_it_would_be_dropped() -> None:
    rules = replace(KEEP_ALL, keeps_text_of_calls=False)
    turn = replace(call("1"), content="B", reasoning="R")
    folded = fold_messages((user("A"), turn, result("1")), rules)
    assert folded[1:3] == [replace(turn, tool_calls=()), call("1")]
    rules = replace(rules, keeps_text_before_calls=False)
    assert fold_messages((user("A"), turn), rules)[1] == turn


def test_a_template_that_keeps_everything_gets_everything_unchanged() -> None:
    messages = [system("A"), system("B"), user("C"), system("D"), call("1"), result("1"), user("E")]
    assert fold_messages(messages, KEEP_ALL) == messages


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Rounds of texts and answers, some with calls and results, as clients send them."""
    names = (f"word{n}" for n in range(10_000))
    texts = st.lists(st.sampled_from([user, system]), max_size=3)
    messages = [make(next(names)) for make in draw(texts)]
    for with_calls in draw(st.lists(st.booleans(), max_size=5)):
        if with_calls:
            id = next(names)
            content = next(names) if draw(st.booleans()) else None
            messages += [replace(call(id), content=content), result(id)]
        else:
            messages += [answer(next(names)) for _ in range(draw(st.integers(1, 2)))]
        messages += [make(next(names)) for make in draw(texts)]
    return messages


def words(messages: list[Message]) -> list[str]:
    return " ".join(message.content or "" for message in messages).split()


@pytest.mark.product
@pytest.mark.parametrize("rules", ALL_RULES)
@given(messages=conversations())
def test_no_text_is_lost_and_the_order_is_kept(
    rules: PlacementRules, messages: list[Message]
) -> None:
    assert words(fold_messages(messages, rules)) == words(messages)


@pytest.mark.product
@pytest.mark.parametrize("rules", ALL_RULES)
@given(messages=conversations(), at=st.integers(0, 20))
def test_each_turn_folds_its_beginning_like_the_turns_before(
    rules: PlacementRules, messages: list[Message], at: int
) -> None:
    answers = [
        n
        for n, message in enumerate(messages)
        if message.role == "assistant" and (n == 0 or messages[n - 1].role != "assistant")
    ]
    if answers:
        earlier = fold_messages(messages[: answers[at % len(answers)]], rules)
        assert fold_messages(messages, rules)[: len(earlier)] == earlier


@pytest.mark.product
@pytest.mark.parametrize("rules", ALL_RULES)
@given(messages=conversations())
def test_folding_twice_changes_nothing(rules: PlacementRules, messages: list[Message]) -> None:
    once = fold_messages(messages, rules)
    assert fold_messages(once, rules) == once
