"""/v1/responses over HTTP: stored, continued, listed and deleted responses."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.requests import Conversation, GenerateRequest
from app.core.settings import Settings
from app.http.api_keys import ApiKey, Keyring, hash_key
from tests.api.asgi import Conversation as Exchange
from tests.api.asgi import Reply, pending_tasks
from tests.fakes import FOREVER, FakeGenerate, Script, build_fake_app, finish, text
from tests.test_openapi import DOCUMENT, validator

URL = "/v1/responses"
HI: dict[str, Any] = {"model": "fake/model", "input": "hi"}


class Server:
    """One application, which gets several requests."""

    def __init__(
        self, script: Script | None = None, *, keys: Sequence[str] = (), **settings: Any
    ) -> None:
        """keys: each is also the name of a key."""
        self.generate = FakeGenerate(script or (text("Hel"), text("lo"), finish()))
        keyring = Keyring(tuple(ApiKey(name=key, digest=hash_key(key)) for key in keys))
        self.app = build_fake_app(self.generate, Settings(**settings), keyring=keyring)

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: str = "",
        disconnect: bool = False,
        key: str | None = None,
    ) -> Reply:
        async def run() -> Reply:
            data = json.dumps(body).encode()
            app = self.app if not query else with_query(self.app, query)
            headers = None if key is None else {"authorization": f"Bearer {key}"}
            exchange = Exchange(app, method, path, data, headers)
            if disconnect:
                await exchange.until(lambda reply: b"output_text.delta" in reply.body)
                exchange.disconnect()
            reply = await exchange.end()
            assert not pending_tasks()
            return reply

        return asyncio.run(run())

    def create(self, *, key: str | None = None, **fields: Any) -> Any:
        reply = self("POST", URL, HI | fields, key=key)
        assert reply.status == 200, reply.body
        return reply.json

    @property
    def last_request(self) -> GenerateRequest:
        return self.generate.opened[-1]

    def roles(self) -> list[str]:
        prompt = self.last_request.prompt
        assert isinstance(prompt, Conversation)
        return [message.role for message in prompt.messages]


def with_query(app: Any, query: str) -> Any:
    async def app_with_query(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"query_string": query.encode()}, receive, send)

    return app_with_query


@pytest.fixture
def server() -> Server:
    return Server()


def get_final_response(reply: Reply) -> Any:
    """The response in the last event of a stream."""
    last = reply.body.decode().removesuffix("\n\n").split("\n\n")[-1]
    return json.loads(last.partition("data: ")[2])["response"]


def test_a_response_is_stored_as_it_was_returned(server: Server):
    created = server.create()
    assert server("GET", f"{URL}/{created['id']}").json == created


def test_a_stream_ends_with_the_stored_response(server: Server):
    created = get_final_response(server("POST", URL, HI | {"stream": True}))
    assert created["output"][0]["content"][0]["text"] == "Hello"
    assert server("GET", f"{URL}/{created['id']}").json == created


def test_a_response_is_continued(server: Server):
    first = server.create()
    second = server.create(previous_response_id=first["id"], input="and?", stream=False)
    assert server.roles() == ["user", "assistant", "user"]
    assert second["previous_response_id"] == first["id"]
    server.create(previous_response_id=second["id"])
    assert server.roles() == ["user", "assistant", "user", "assistant", "user"]


def test_instructions_apply_to_one_response_only(server: Server):
    first = server.create(instructions="Be brief.")
    assert server.roles() == ["system", "user"]
    server.create(previous_response_id=first["id"])
    assert server.roles() == ["user", "assistant", "user"]


def test_a_response_is_not_stored_with_store_false(server: Server):
    created = server.create(store=False)
    assert server("GET", f"{URL}/{created['id']}").status == 404
    reply = server("POST", URL, HI | {"previous_response_id": created["id"]})
    assert reply.status == 400
    assert reply.error["code"] == "previous_response_not_found"
    assert reply.error["param"] == "previous_response_id"


def test_an_unstored_response_may_continue_a_stored_one(server: Server):
    first = server.create()
    server.create(previous_response_id=first["id"], store=False)
    assert server.roles() == ["user", "assistant", "user"]


def test_an_incomplete_response_is_stored():
    server = Server([text("Hel"), finish("length")])
    created = server.create()
    assert created["status"] == "incomplete"
    assert server("GET", f"{URL}/{created['id']}").json == created


def test_a_response_is_not_stored_after_a_disconnect():
    server = Server([text("Hel"), FOREVER])
    reply = server("POST", URL, HI | {"stream": True}, disconnect=True)
    assert server.generate.num_closed == 1
    created = json.loads(reply.body.decode().split("\n\n")[0].partition("data: ")[2])
    assert server("GET", f"{URL}/{created['response']['id']}").status == 404


def test_a_failed_response_is_not_stored():
    server = Server([text("Hel"), AppError(ErrorKind.ENGINE, "out of memory")])
    failed = get_final_response(server("POST", URL, HI | {"stream": True}))
    assert failed["status"] == "failed"
    assert server("GET", f"{URL}/{failed['id']}").status == 404
    assert server("POST", URL, HI).status == 500


def test_a_deleted_response_cannot_be_read_or_continued(server: Server):
    created = server.create()
    path = f"{URL}/{created['id']}"
    assert server("DELETE", path).json == {
        "id": created["id"],
        "object": "response",
        "deleted": True,
    }
    assert server("DELETE", path).status == 404
    assert server("POST", URL, HI | {"previous_response_id": created["id"]}).status == 400


def test_each_application_has_its_own_store(server: Server):
    created = server.create()
    assert Server()("GET", f"{URL}/{created['id']}").status == 404


def test_a_response_belongs_to_the_key_that_created_it():
    server = Server(keys=("one", "other"))
    created = server.create(key="one")
    path = f"{URL}/{created['id']}"
    assert server("GET", path, key="other").status == 404
    assert server("GET", f"{path}/input_items", key="other").status == 404
    assert server("DELETE", path, key="other").status == 404
    continued = HI | {"previous_response_id": created["id"]}
    reply = server("POST", URL, continued, key="other")
    assert (reply.status, reply.json["error"]["code"]) == (400, "previous_response_not_found")
    assert server("POST", COUNT, continued, key="other").status == 400
    assert server("GET", path, key="one").json == created


def test_large_responses_of_one_key_do_not_evict_those_of_another():
    server = Server(keys=("light", "heavy"))
    created = server.create(key="light")
    large = [server.create(key="heavy", input="x" * (6 << 20))["id"] for _ in range(24)]
    found = [server("GET", f"{URL}/{id_}", key="heavy").status for id_ in (large[0], large[-1])]
    assert found == [404, 200]
    assert server("GET", f"{URL}/{created['id']}", key="light").json == created
    too_large = server.create(key="heavy", input="x" * (25 << 20))
    reply = server("GET", f"{URL}/{too_large['id']}", key="heavy")
    assert (reply.status, "larger than 24 MiB are not stored" in reply.body.decode()) == (
        404,
        True,
    )


def test_stored_responses_match_the_openapi_document(server: Server):
    path = f"{URL}/{server.create()['id']}"
    for method, suffix in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        operation = DOCUMENT["paths"][f"{URL}/{{response_id}}{suffix}"][method.lower()]
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        validator(schema).validate(server(method, path + suffix).json)


def test_responses_cannot_be_cancelled(server: Server):
    created = server.create()
    reply = server("POST", f"{URL}/{created['id']}/cancel")
    assert reply.status == 400
    assert "only background responses can be cancelled" in reply.error["message"]
    assert server("POST", f"{URL}/none/cancel").status == 404


def test_a_stored_response_cannot_be_streamed(server: Server):
    created = server.create()
    reply = server("GET", f"{URL}/{created['id']}", query="stream=true")
    assert (reply.status, reply.error["param"]) == (400, "stream")
    assert server("GET", f"{URL}/{created['id']}", query="stream=false").status == 200


# Lists


def list_input_items(server: Server, id_: str, query: str = "") -> Any:
    reply = server("GET", f"{URL}/{id_}/input_items", query=query)
    assert reply.status == 200, reply.body
    return reply.json


def create_with_five_items(server: Server) -> str:
    items = [{"id": f"msg_{n}", "role": "user", "content": str(n)} for n in range(5)]
    return server.create(input=items)["id"]


def test_input_items_are_listed_newest_first(server: Server):
    id_ = create_with_five_items(server)
    page = list_input_items(server, id_)
    assert [item["id"] for item in page["data"]] == [f"msg_{n}" for n in (4, 3, 2, 1, 0)]
    assert page["object"] == "list"
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("msg_4", "msg_0", False)


def test_input_items_are_paginated(server: Server):
    id_ = create_with_five_items(server)
    first = list_input_items(server, id_, "limit=2&order=asc")
    assert ([item["id"] for item in first["data"]], first["has_more"]) == (["msg_0", "msg_1"], True)
    rest = list_input_items(server, id_, "limit=3&order=asc&after=msg_1")
    assert [item["id"] for item in rest["data"]] == ["msg_2", "msg_3", "msg_4"]
    assert rest["has_more"] is False
    assert list_input_items(server, id_, "order=asc&after=msg_4")["data"] == []


def test_input_items_exclude_those_of_the_previous_response(server: Server):
    first = server.create()
    second = server.create(previous_response_id=first["id"], input="and?")
    (item,) = list_input_items(server, second["id"])["data"]
    assert item["content"] == [{"type": "input_text", "text": "and?"}]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=1.5", "limit"),
        ("limit=²", "limit"),
        ("order=up", "order"),
        ("after=msg_9", "after"),
    ],
)
def test_an_invalid_query_is_rejected(server: Server, query: str, param: str):
    reply = server("GET", f"{URL}/{create_with_five_items(server)}/input_items", query=query)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_an_unknown_response_has_no_items(server: Server):
    reply = server("GET", f"{URL}/none/input_items")
    assert (reply.status, reply.error["param"]) == (404, "response_id")


def test_a_browser_page_may_delete(server: Server):
    async def preflight() -> Reply:
        headers = {
            "origin": "http://localhost:3000",
            "access-control-request-method": "DELETE",
        }
        return await Exchange(server.app, "OPTIONS", f"{URL}/x", b"", headers).end()

    reply = asyncio.run(preflight())
    assert reply.status == 200
    assert "DELETE" in reply.headers["access-control-allow-methods"]


COUNT = f"{URL}/input_tokens"


def test_the_tokens_of_a_request_are_counted(server: Server):
    body = {
        **HI,
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "now"}],
        "stream": True,
        "reasoning": {"effort": "low"},
    }
    reply = server("POST", COUNT, body)
    assert reply.json == {
        "object": "response.input_tokens",
        "input_tokens": len("Be brief.hi"),
    }
    server.create(**{name: body[name] for name in ("instructions", "tools", "reasoning")})
    (counted,) = server.generate.tokenized_chats
    assert replace(counted, admin=True) == server.last_request
    # the count generates nothing and stores nothing
    assert len(server.generate.opened) == 1


def test_the_previous_response_is_counted_too(server: Server):
    first = server.create()
    reply = server("POST", COUNT, {**HI, "previous_response_id": first["id"]})
    assert reply.json["input_tokens"] == len("hiHellohi")


def test_a_count_may_omit_model_and_input(server: Server):
    reply = server("POST", COUNT, {"instructions": "Be brief.", "model": None})
    assert reply.json["input_tokens"] == len("Be brief.")
    assert server.generate.tokenized_chats[0].model == HI["model"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ([], 400, None),
        ({**HI, "model": "none"}, 404, "model"),
        ({**HI, "previous_response_id": "resp_0"}, 400, "previous_response_id"),
        ({**HI, "inputs": 1}, 400, "inputs"),
    ],
)
def test_an_invalid_count_request_is_rejected(
    server: Server, body: Any, status: int, param: str | None
):
    reply = server("POST", COUNT, body)
    assert (reply.status, reply.error["param"]) == (status, param)


def test_responses_are_not_compacted(server: Server):
    """404, as for every unknown path: a 405 would mean that another method compacts them."""
    reply = server("POST", f"{URL}/compact", HI)
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    assert set(reply.error) == {"message", "type", "param", "code"}
