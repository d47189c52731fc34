"""What is kept of responses, for how long, and that a chain never loses its beginning first."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.responses.store import ResponseStore, ResponseStores, StoredResponse, item_ids
from app.core.errors import AppError


def kept(id_: str, previous: str | None = None, *, text: str = "hi") -> StoredResponse:
    said: list[Any] = [{"type": "message", "id": f"msg_in_{id_}", "text": text}]
    answer: list[Any] = [{"type": "message", "id": f"msg_out_{id_}", "text": "hello"}]
    return StoredResponse(
        id=id_,
        previous_response_id=previous,
        input=orjson.dumps(said),
        body=orjson.dumps({"id": id_, "output": answer}),
        items=item_ids([*said, *answer]),
    )


def holding(*entries: StoredResponse, **bounds: int) -> ResponseStore:
    store = ResponseStores(**bounds).for_caller("")
    for entry in entries:
        store.add(entry)
    return store


def ids(store: ResponseStore, *names: str) -> list[str]:
    return [name for name in names if store.find(name) is not None]


def test_a_conversation_is_everything_that_was_said_in_order():
    store = holding(kept("a"), kept("b", "a"), kept("c", "b"))
    assert [item["id"] for item in store.get_conversation("c")] == [
        "msg_in_a",
        "msg_out_a",
        "msg_in_b",
        "msg_out_b",
        "msg_in_c",
        "msg_out_c",
    ]


def test_a_response_that_is_not_kept_has_the_code_that_clients_look_for():
    with pytest.raises(AppError, match="'none' was not found") as raised:
        ResponseStores().for_caller("").chain("none")
    assert raised.value.code == "previous_response_not_found"
    assert raised.value.param == "previous_response_id"


def test_a_chain_with_a_gap_names_what_is_missing():
    store = holding(kept("a"), kept("b", "a"))
    store.delete("a")
    with pytest.raises(AppError, match="'b' continues 'a', which was not found"):
        store.chain("b")


def test_items_of_both_sides_are_found_by_their_ids():
    store = holding(kept("a"))
    assert store.get_item("msg_in_a") == {"type": "message", "id": "msg_in_a", "text": "hi"}
    assert store.get_item("msg_out_a") is not None
    store.delete("a")
    assert store.get_item("msg_out_a") is None


def test_an_item_that_was_sent_again_is_found_as_long_as_the_later_copy_is_kept():
    again = StoredResponse(
        id="b", previous_response_id=None, input=b"[]", body=kept("a").body, items=("msg_out_a",)
    )
    store = holding(kept("a"), again)
    store.delete("a")
    assert store.get_item("msg_out_a") is not None


def test_the_least_recently_used_goes_first():
    store = holding(kept("a"), kept("b"), kept("c"), max_responses=3)
    store.touch("a")
    store.add(kept("d"))
    assert ids(store, "a", "b", "c", "d") == ["a", "c", "d"]


def test_who_continues_a_chain_uses_all_of_it():
    store = holding(kept("a"), kept("b", "a"), kept("other"), max_responses=3)
    store.add(kept("c", "b"))
    assert ids(store, "a", "b", "c", "other") == ["a", "b", "c"]


def test_bytes_are_bounded_too():
    store = holding(kept("a", text="x" * 5000), kept("b"), max_bytes=8000)
    assert ids(store, "a", "b") == ["b"]
    assert store.nbytes == kept("b").size


def test_what_has_no_room_at_all_is_not_kept_and_costs_only_what_was_in_its_way():
    store = holding(kept("huge", text="x" * 9000), max_bytes=8000)
    assert len(store) == store.nbytes == 0


def test_a_response_that_is_too_large_is_not_kept_and_costs_nothing():
    store = holding(kept("a"), kept("large", text="x" * 9000), max_response_bytes=8000)
    assert ids(store, "a", "large") == ["a"]


@pytest.mark.parametrize("bounds", [{"max_bytes": 20_000}, {"max_responses": 8}])
def test_who_holds_most_makes_room(bounds: dict[str, int]):
    """Eight large responses of one key cost every other key all of its own."""
    stores = ResponseStores(**bounds)
    light, heavy = stores.for_caller("light"), stores.for_caller("heavy")
    light.add(kept("a"))
    light.add(kept("b", "a"))
    for number in range(20):
        heavy.add(kept(f"h{number}", text="x" * 3000))
        assert ids(light, "a", "b") == ["a", "b"]
    assert heavy.find("h19") is not None
    assert heavy.find("h0") is None
    light.add(kept("c", "b"))
    assert ids(light, "a", "b", "c") == ["a", "b", "c"]
    assert light.nbytes + heavy.nbytes <= 8 * kept("h0", text="x" * 3000).size


def test_a_caller_has_the_whole_room_while_no_other_needs_it():
    stores = ResponseStores(max_responses=4)
    stores.for_caller("other")
    one = stores.for_caller("one")
    for name in "abcd":
        one.add(kept(name))
    assert ids(one, *"abcd") == list("abcd")


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """(what, which earlier response, how much text)."""
    what = st.sampled_from(["add", "continue", "touch", "delete"])
    return draw(st.lists(st.tuples(what, st.integers(0, 40), st.integers(0, 3000)), max_size=60))


@given(histories(), st.integers(1, 8), st.integers(2000, 12_000))
def test_whatever_happens_the_bounds_hold_and_chains_are_whole(
    history: list[tuple[str, int, int]], max_responses: int, max_bytes: int
):
    """Whole, unless a client itself has deleted something from them."""
    store = ResponseStores(max_responses, max_bytes).for_caller("")
    names: list[str] = []
    deleted: set[str] = set()
    for number, (what, which, size) in enumerate(history):
        chosen = names[which % len(names)] if names else None
        match what:
            case "add":
                names.append(f"r{number}")
                store.add(kept(f"r{number}", text="x" * size))
            case "continue" if chosen is not None and store.find(chosen) is not None:
                names.append(f"r{number}")
                store.add(kept(f"r{number}", chosen, text="x" * size))
            case "touch" if chosen is not None:
                store.touch(chosen)
            case "delete" if chosen is not None:
                deleted.add(chosen)
                store.delete(chosen)
            case _:
                pass
        present = [found for found in map(store.find, names) if found is not None]
        assert len(store) == len(present) <= max_responses
        assert store.nbytes == sum(found.size for found in present) <= max_bytes
        for found in present:
            parent = found.previous_response_id
            assert parent is None or parent in deleted or store.find(parent) is not None
