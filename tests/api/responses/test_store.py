"""The store of responses: its bounds, and that the first response of a chain is never evicted
first."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.responses.store import ResponseStore, ResponseStores, StoredResponse, item_ids
from app.core.errors import AppError


def build_response(id_: str, previous: str | None = None, *, text: str = "hi") -> StoredResponse:
    message: list[Any] = [{"type": "message", "id": f"msg_in_{id_}", "text": text}]
    answer: list[Any] = [{"type": "message", "id": f"msg_out_{id_}", "text": "hello"}]
    return StoredResponse(
        id=id_,
        previous_response_id=previous,
        input=orjson.dumps(message),
        body=orjson.dumps({"id": id_, "output": answer}),
        items=item_ids([*message, *answer]),
    )


def build_store(*entries: StoredResponse, **bounds: int) -> ResponseStore:
    store = ResponseStores(**bounds).for_caller("")
    for entry in entries:
        store.add(entry)
    return store


def list_found(store: ResponseStore, *names: str) -> list[str]:
    return [name for name in names if store.find(name) is not None]


def test_a_conversation_has_all_items_of_the_chain_in_order():
    store = build_store(build_response("a"), build_response("b", "a"), build_response("c", "b"))
    assert [item["id"] for item in store.get_conversation("c")] == [
        "msg_in_a",
        "msg_out_a",
        "msg_in_b",
        "msg_out_b",
        "msg_in_c",
        "msg_out_c",
    ]


def test_an_unknown_response_has_openais_error_code():
    with pytest.raises(AppError, match="'none' was not found") as raised:
        ResponseStores().for_caller("").chain("none")
    assert raised.value.code == "previous_response_not_found"
    assert raised.value.param == "previous_response_id"


def test_the_error_of_a_chain_with_a_gap_names_the_missing_response():
    store = build_store(build_response("a"), build_response("b", "a"))
    store.delete("a")
    with pytest.raises(AppError, match="'b' continues 'a', which was not found"):
        store.chain("b")


def test_input_and_output_items_are_found_by_their_ids():
    store = build_store(build_response("a"))
    assert store.get_item("msg_in_a") == {"type": "message", "id": "msg_in_a", "text": "hi"}
    assert store.get_item("msg_out_a") is not None
    store.delete("a")
    assert store.get_item("msg_out_a") is None


def test_an_item_that_is_stored_twice_is_found_until_both_copies_are_deleted():
    again = StoredResponse(
        id="b",
        previous_response_id=None,
        input=b"[]",
        body=build_response("a").body,
        items=("msg_out_a",),
    )
    store = build_store(build_response("a"), again)
    store.delete("a")
    assert store.get_item("msg_out_a") is not None


def test_the_least_recently_used_response_is_evicted_first():
    store = build_store(
        build_response("a"), build_response("b"), build_response("c"), max_responses=3
    )
    store.touch("a")
    store.add(build_response("d"))
    assert list_found(store, "a", "b", "c", "d") == ["a", "c", "d"]


def test_continuing_a_chain_touches_all_of_it():
    store = build_store(
        build_response("a"), build_response("b", "a"), build_response("other"), max_responses=3
    )
    store.add(build_response("c", "b"))
    assert list_found(store, "a", "b", "c", "other") == ["a", "b", "c"]


def test_bytes_are_bounded():
    store = build_store(build_response("a", text="x" * 5000), build_response("b"), max_bytes=8000)
    assert list_found(store, "a", "b") == ["b"]
    assert store.nbytes == build_response("b").size


def test_a_response_larger_than_the_store_is_not_stored():
    store = build_store(build_response("huge", text="x" * 9000), max_bytes=8000)
    assert len(store) == store.nbytes == 0


def test_a_too_large_response_is_not_stored_and_evicts_nothing():
    store = build_store(
        build_response("a"), build_response("large", text="x" * 9000), max_response_bytes=8000
    )
    assert list_found(store, "a", "large") == ["a"]


@pytest.mark.parametrize("bounds", [{"max_bytes": 20_000}, {"max_responses": 8}])
def test_eviction_takes_from_the_caller_with_the_most_bytes(bounds: dict[str, int]):
    """Eight large responses of one key evicted all responses of every other key."""
    stores = ResponseStores(**bounds)
    light, heavy = stores.for_caller("light"), stores.for_caller("heavy")
    light.add(build_response("a"))
    light.add(build_response("b", "a"))
    for number in range(20):
        heavy.add(build_response(f"h{number}", text="x" * 3000))
        assert list_found(light, "a", "b") == ["a", "b"]
    assert heavy.find("h19") is not None
    assert heavy.find("h0") is None
    light.add(build_response("c", "b"))
    assert list_found(light, "a", "b", "c") == ["a", "b", "c"]
    assert light.nbytes + heavy.nbytes <= 8 * build_response("h0", text="x" * 3000).size


def test_one_caller_may_use_the_whole_store():
    stores = ResponseStores(max_responses=4)
    stores.for_caller("other")
    one = stores.for_caller("one")
    for name in "abcd":
        one.add(build_response(name))
    assert list_found(one, *"abcd") == list("abcd")


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """(operation, index of an earlier response, length of the text)."""
    operation = st.sampled_from(["add", "continue", "touch", "delete"])
    return draw(
        st.lists(st.tuples(operation, st.integers(0, 40), st.integers(0, 3000)), max_size=60)
    )


@given(histories(), st.integers(1, 8), st.integers(2000, 12_000))
def test_the_bounds_hold_and_chains_stay_complete(
    history: list[tuple[str, int, int]], max_responses: int, max_bytes: int
):
    """Complete, except for responses that the client deleted."""
    store = ResponseStores(max_responses, max_bytes).for_caller("")
    names: list[str] = []
    deleted: set[str] = set()
    for number, (operation, index, size) in enumerate(history):
        earlier = names[index % len(names)] if names else None
        match operation:
            case "add":
                names.append(f"r{number}")
                store.add(build_response(f"r{number}", text="x" * size))
            case "continue" if earlier is not None and store.find(earlier) is not None:
                names.append(f"r{number}")
                store.add(build_response(f"r{number}", earlier, text="x" * size))
            case "touch" if earlier is not None:
                store.touch(earlier)
            case "delete" if earlier is not None:
                deleted.add(earlier)
                store.delete(earlier)
            case _:
                pass
        stored = [response for response in map(store.find, names) if response is not None]
        assert len(store) == len(stored) <= max_responses
        assert store.nbytes == sum(response.size for response in stored) <= max_bytes
        for response in stored:
            parent = response.previous_response_id
            assert parent is None or parent in deleted or store.find(parent) is not None
