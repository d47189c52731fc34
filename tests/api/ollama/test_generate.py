"""POST /api/generate: templates, raw prompts, the context, filling in, loading."""

from dataclasses import replace
from typing import Any

from app.core.events import PromptTokenIds, ReasoningDelta
from app.core.requests import Conversation, Message
from tests.api.asgi import Reply
from tests.api.ollama.test_chat import get_sent_request, lines
from tests.fakes import CARD, DETAILS, FakeGenerate, finish, text


def send_request(call: Any, **fields: Any) -> Reply:
    return call("POST", "/api/generate", {"model": CARD.id, "prompt": "hi", **fields})


def test_the_prompt_is_a_message_after_the_system_prompt(generate: FakeGenerate, call):
    first, *_ = lines(send_request(call, system="Rhyme."))
    assert (first["response"], first["done"]) == ("Hel", False)
    assert get_sent_request(generate).prompt == Conversation(
        messages=(Message(role="system", content="Rhyme."), Message(role="user", content="hi")),
        param="prompt",
    )


def test_the_last_line_has_the_token_ids_that_continue_the_conversation(
    generate: FakeGenerate, call
):
    said = text("Hi")
    generate.script = [PromptTokenIds(token_ids=(1, 2)), replace(said, token_ids=(3,)), finish()]
    assert lines(send_request(call))[-1]["context"] == [1, 2, 3]
    assert send_request(call, context=[1, 2, 3], stream=False).json["context"] == [1, 2, 3]
    prompt = get_sent_request(generate).prompt
    assert isinstance(prompt, Conversation)
    assert prompt.earlier_ids == (1, 2, 3)


def test_a_raw_prompt_is_not_rendered(generate: FakeGenerate, call):
    reply = send_request(call, raw=True, stream=False)
    assert get_sent_request(generate).prompt == "hi"
    assert "context" not in reply.json
    for more in ({"system": "x"}, {"context": [1]}, {"template": "x"}):
        refused = send_request(call, raw=True, **more)
        assert refused.status == 400
        assert "raw mode does not support" in refused.json["error"]


def test_a_template_in_a_request_is_refused(call):
    assert send_request(call, template="{{ .Prompt }}").status == 400


def test_a_suffix_requests_infilling(generate: FakeGenerate, call):
    assert send_request(call, suffix=" end").status == 200
    assert (get_sent_request(generate).prompt, get_sent_request(generate).suffix) == ("hi", " end")
    generate.details = replace(DETAILS, capabilities=frozenset({"completion"}))
    assert "does not support insert" in send_request(call, suffix=" end").json["error"]


def test_thinking_has_its_own_field(generate: FakeGenerate, call):
    generate.script = [ReasoningDelta(text="Hm"), text("Hi"), finish()]
    assert lines(send_request(call))[0]["thinking"] == "Hm"
    whole = send_request(call, stream=False).json
    assert (whole["thinking"], whole["response"]) == ("Hm", "Hi")


def test_a_request_without_a_prompt_loads_or_unloads_the_model(generate: FakeGenerate, call):
    """Open WebUI unloads this way."""
    assert lines(send_request(call, prompt=""))[0]["done_reason"] == "load"
    assert lines(send_request(call, prompt="", keep_alive="0"))[0]["done_reason"] == "unload"
    assert (generate.loaded, generate.unloaded) == ([(CARD.id, None)], [CARD.id])


def test_texts_are_embedded(generate: FakeGenerate, call):
    body = {"model": CARD.id, "input": ["a", "bb"], "dimensions": 2, "options": {"num_ctx": 1}}
    got = call("POST", "/api/embed", body).json
    assert got["embeddings"] == [[0.0, 1.0], [1.0, 2.0]]
    assert (got["model"], got["prompt_eval_count"]) == (CARD.id, 3)
    assert generate.embedded[-1].truncate
    older = call("POST", "/api/embeddings", {"model": CARD.id, "prompt": "a"})
    assert older.json == {"embedding": [0.0, 1.0, 0.5, -0.25]}


def test_an_empty_input_has_no_vector(generate: FakeGenerate, call):
    for nothing in ([], "", None):
        body = {"model": CARD.id, "input": nothing}
        assert call("POST", "/api/embed", body).json["embeddings"] == []
    assert call("POST", "/api/embeddings", {"model": CARD.id}).json == {"embedding": []}
    assert not generate.embedded


def test_an_invalid_input_is_refused(call):
    for wrong in (7, {"a": 1}, ["a", 1], [""]):
        assert call("POST", "/api/embed", {"model": CARD.id, "input": wrong}).status == 400
    reply = call("POST", "/api/embed", {"model": "no", "input": "a"})
    assert (reply.status, reply.json["error"]) == (
        404,
        'model "no" not found, try pulling it first',
    )
