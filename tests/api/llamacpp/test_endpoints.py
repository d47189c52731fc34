"""llama.cpp's endpoints: native completions, infill, templates, properties and slots."""

import json
from dataclasses import replace
from typing import Any

import pytest

from app.core.events import PrefillProgress, PromptTokenIds, TextDelta, TokenLogprob, TopLogprob
from app.core.model_files import GenerationDefaults
from app.core.models import ModelState
from app.core.requests import JsonSchema, LarkGrammar, PromptBatch
from tests.api.asgi import Reply, send_request
from tests.fakes import CARD, STATS, FakeGenerate, Script, finish
from tests.rows import rows

HI = [{"role": "user", "content": "hi"}]


def delta(text: str, *ids: int, choice: int = 0) -> TextDelta:
    return TextDelta(choice=choice, text=text, token_ids=ids)


def script(*events: Any) -> Script:
    return [PromptTokenIds(token_ids=(104, 105)), *events]


HELLO = script(delta("Hel", 1, 2), delta("lo\n", 3), finish("length", tokens=3))


def complete(generate: FakeGenerate | None = None, path: str = "/completion", **body: Any) -> Reply:
    return send_request(generate or FakeGenerate(HELLO), "POST", path, {"prompt": "hi"} | body)


def read_chunks(reply: Reply) -> list[Any]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [
        json.loads(line[6:])
        for line in reply.body.decode().splitlines()
        if line.startswith("data: ")
    ]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_body_has_llama_cpps_fields(path: str):
    body = complete(path=path, return_tokens=True).json
    settings = body.pop("generation_settings")
    timings = body.pop("timings")
    assert body == {
        "index": 0,
        "content": "Hello\n",
        "tokens": [1, 2, 3],
        "id_slot": -1,
        "stop": True,
        "model": CARD.id,
        "tokens_predicted": 3,
        "tokens_evaluated": 7,
        "prompt": "hi",
        "has_new_line": True,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_cached": 3,
    }
    assert (timings["prompt_n"], timings["predicted_n"]) == (4, 3)
    assert (settings["n_predict"], settings["mirostat"]) == (-1, 0)


def test_a_stream_ends_with_the_figures():
    first, second, end = read_chunks(complete(stream=True))
    assert (first["content"], first["tokens"], first["stop"]) == ("Hel", [1, 2], False)
    assert (second["content"], second["tokens_predicted"]) == ("lo\n", 3)
    assert (end["content"], end["tokens"], end["stop"]) == ("", [], True)
    assert end["generation_settings"]["stream"] is True


@rows(
    ("end", "stop_type", "word"),
    [
        ({"reason": "stop"}, "eos", ""),
        ({"reason": "length"}, "limit", ""),
        ({"reason": "stop", "stop_string": "###"}, "word", "###"),
    ],
)
def test_the_stop_type_says_what_ended_the_output(end: dict[str, Any], stop_type: str, word: str):
    body = complete(FakeGenerate(script(delta("a", 1), replace(finish(), **end)))).json
    assert (body["stop_type"], body["stopping_word"]) == (stop_type, word)


def test_response_fields_select_fields_by_path():
    names = ["content", "generation_settings/n_predict", "timings/none", "none/none"]
    body = complete(response_fields=names, n_predict=5).json
    assert body == {"content": "Hello\n", "generation_settings/n_predict": 5}


def test_probabilities_have_token_ids():
    other = TopLogprob(text="?", token_bytes=b"?", logprob=-2.0, token_id=63)
    token = TokenLogprob(
        text="H", token_bytes=b"H", logprob=-0.5, top_logprobs=(other,), token_id=72
    )
    text = TextDelta(text="H", token_ids=(72,), logprobs=(token,))
    generate = FakeGenerate(script(text, finish()))
    shown = {"id": 72, "token": "H", "bytes": [72], "logprob": -0.5}
    rival = {"id": 63, "token": "?", "bytes": [63], "logprob": -2.0}
    expected = [{**shown, "top_logprobs": [rival]}]
    assert complete(generate, n_probs=1).json["completion_probabilities"] == expected
    assert (
        read_chunks(complete(generate, n_probs=1, stream=True))[0]["completion_probabilities"]
        == expected
    )
    assert generate.opened[0].top_logprobs == 1


def test_progress_and_timings_are_streamed_on_request():
    progress = [PrefillProgress(computed_tokens=computed, total_tokens=7) for computed in (3, 5, 7)]
    generate = FakeGenerate([*progress, *HELLO])
    chunks = read_chunks(
        complete(generate, stream=True, return_progress=True, timings_per_token=True)
    )
    reports = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert [(r["total"], r["cache"], r["processed"]) for r in reports] == [
        (7, 3, 3),
        (7, 3, 5),
        (7, 3, 7),
    ]
    assert chunks[0]["timings"]["prompt_n"] == 0
    assert chunks[0]["timings"]["prompt_ms"] == 0.0
    assert chunks[2]["timings"]["prompt_n"] == 4
    assert all(value >= 0 for chunk in chunks for value in chunk["timings"].values())
    assert "prompt_progress" not in complete(generate, stream=True).body.decode()


@rows(
    ("prompt", "ids"),
    [
        ("hi", (104, 105)),
        ([1, 2], (1, 2)),
        ([1, "hi", 2], (1, 104, 105, 2)),
        ({"prompt_string": "hi"}, (104, 105)),
    ],
)
def test_a_prompt_is_tokenized(prompt: Any, ids: tuple[int, ...]):
    generate = FakeGenerate(HELLO)
    assert isinstance(complete(generate, prompt=prompt).json, dict)
    assert generate.opened[0].prompt == ids
    # only the start of a prompt gets special tokens
    starts = not isinstance(prompt, list)
    assert all(special == starts for *_, special in generate.tokenized)


def test_a_list_of_prompts_gets_a_list():
    events = delta("b", 1, choice=1), finish_of(1), delta("a", 1, choice=0), finish_of(0)
    generate = FakeGenerate(events)
    found = complete(generate, prompt=["hi", [1, 2]]).json
    assert [body["content"] for body in found] == ["a", "b"]
    assert [body["prompt"] for body in found] == ["hi", "\x01\x02"]
    assert generate.opened[0].prompt == PromptBatch(prompts=((104, 105), (1, 2)))
    single = complete(FakeGenerate(HELLO), prompt=["hi"]).json
    assert [body["content"] for body in single] == ["Hello\n"]


def finish_of(choice: int) -> Any:
    return replace(finish(), choice=choice, prompt_index=choice)


def test_options_have_llama_cpps_names():
    generate = FakeGenerate(HELLO)
    reply = complete(
        generate,
        n_predict=9,
        temperature=0.5,
        repeat_penalty=1.5,
        n_keep=-1,
        cache_prompt=False,
        stop=["a"],
        seed=-1,
        json_schema={"type": "object"},
        logit_bias=[[5, 2.5], [6, False], ["hi", -1], ["7", 1]],
        # these have no effect, or are off
        id_slot=0,
        n_indent=3,
        t_max_predict_ms=100,
        dry_base=1.75,
        typ_p=1,
        lora=[],
        mirostat=0,
    )
    request = generate.opened[0]
    assert reply.status == 200
    assert (request.max_tokens, request.num_keep, request.cache_prompt) == (9, -1, False)
    assert request.stop == ("a",)
    assert request.grammar == JsonSchema(text='{"type":"object"}', param="json_schema")
    assert dict(request.sampling) == {
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": ((5, 2.5), (6, -100.0), (7, 1.0), (104, -1.0), (105, -1.0)),
    }
    assert {"token": 104, "bias": -1.0} in reply.json["generation_settings"]["logit_bias"]


def test_ignored_ends_are_biases_without_a_number():
    class FakeWithEnd(FakeGenerate):
        async def get_tokenizer_info(self, model: Any) -> dict[str, Any]:
            return {"eos_token": "E"}

    generate = FakeWithEnd(HELLO)
    settings = complete(generate, ignore_eos=True).json["generation_settings"]
    assert settings["logit_bias"] == [{"token": ord("E"), "bias": None}]
    assert complete(generate).json["generation_settings"]["logit_bias"] == []


@rows(
    ("samplers", "off", "notice"),
    [
        (["top_k", "infill"], {"top_p", "temperature", "min_p"}, "not supported: infill"),
        (["top_p", "temperature"], {"top_k", "min_p"}, "the order is fixed"),
    ],
)
def test_samplers_that_are_not_listed_are_off(samplers: list[str], off: set[str], notice: str):
    """llama.vim sends `samplers` with every request."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
    given = {"top_k": 9, "top_p": 0.5, "min_p": 0.5, "temperature": 0.5}
    generate = FakeGenerate(HELLO)
    reply = complete(generate, samplers=samplers, **given)
    sampling = generate.opened[0].sampling
    assert {name for name in given if sampling[name] == neutral[name]} == off
    assert notice in reply.headers["x-mlxrunner-notice"]


@rows(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [1, -1]}, "prompt.0"),
        ({"prompt": {}}, "prompt.prompt_string"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["iVBO"]}}, "prompt.multimodal_data"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_predict": 3, "max_tokens": 2**31}, "max_tokens"),
        ({"n_probs": 21}, "n_probs"),
        ({"temperature": "hot"}, "temperature"),
        ({"mirostat": 2}, "mirostat"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"lora": [{"id": 0}]}, "lora"),
        ({"samplers": "top_k"}, "samplers"),
        ({"samplers": ["top_k", 5]}, "samplers"),
        ({"logit_bias": [[5, 101]]}, "logit_bias.0"),
        ({"logit_bias": [[-5, 1]]}, "logit_bias.0"),
        ({"logit_bias": [7]}, "logit_bias.0"),
        ({"grammar": "root ::= x", "json_schema": {}}, "grammar"),
        ({"model": 5}, "model"),
    ],
)
def test_an_invalid_field_is_named(body: dict[str, Any], param: str):
    reply = complete(**body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_request_of_ollamas_runner_still_gets_its_lines():
    generate = FakeGenerate()
    for body in ({"prompt": "hi", "options": {}}, {"Prompt": "hi", "Options": {"num_predict": 3}}):
        reply = send_request(generate, "POST", "/completion", body)
        assert reply.headers["content-type"] == "application/jsonl"
    reply = send_request(generate, "POST", "/completions", {"prompt": "hi"})
    assert reply.headers["content-type"] == "application/json"


def test_infill_puts_other_files_before_the_prefix():
    generate = FakeGenerate(HELLO)
    body = {
        "input_extra": [{"filename": "a.h", "text": "int f();", "time": 5}, {"text": "x"}],
        "input_prefix": "int main() {\n",
        "prompt": "  f(",
        "input_suffix": "}\n",
        "grammar": "root ::= x",
    }
    reply = send_request(generate, "POST", "/infill", body)
    request = generate.opened[0]
    assert reply.json["content"] == "Hello\n"
    assert request.prompt == "--- a.h ---\nint f();\n--- snippet ---\nx\nint main() {\n  f("
    assert request.suffix == "}\n"
    assert request.grammar == LarkGrammar(text="root ::= x", param="grammar")


@rows(
    ("body", "param"),
    [
        ({}, "input_prefix"),
        ({"input_prefix": 5}, "input_prefix"),
        ({"input_prefix": "a", "input_extra": [{}]}, "input_extra.0.text"),
        ({"input_prefix": "a", "input_extra": [5]}, "input_extra.0"),
        ({"input_prefix": "a", "input_extra": [{"text": 5}]}, "input_extra.0.text"),
    ],
)
def test_an_invalid_infill_is_rejected(body: dict[str, Any], param: str):
    reply = send_request(FakeGenerate(), "POST", "/infill", body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_template_is_applied():
    generate = FakeGenerate()
    reply = send_request(generate, "POST", "/apply-template", {"messages": HI})
    assert reply.json == {"prompt": "hi"}
    body = {"messages": HI, "add_generation_prompt": False}
    send_request(generate, "POST", "/apply-template", body)
    assert generate.tokenized_chats[1].chat_template_kwargs == {"add_generation_prompt": False}
    assert send_request(generate, "POST", "/apply-template", {"messages": 5}).status == 400


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_the_tokens_of_a_chat_are_counted(prefix: str):
    path = f"{prefix}/chat/completions/input_tokens"
    reply = send_request(FakeGenerate(), "POST", path, {"messages": HI, "max_tokens": 5})
    assert reply.json == {"object": "response.input_tokens", "input_tokens": 2}


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
@pytest.mark.parametrize("name", ["content", "input"])
def test_native_embeddings_are_lists_of_vectors(path: str, name: str):
    found = send_request(FakeGenerate(), "POST", path, {name: ["a", "bc"]}).json
    assert found == [
        {"index": 0, "embedding": [[0.0, 1.0, 0.5, -0.25]]},
        {"index": 1, "embedding": [[1.0, 2.0, 0.5, -0.25]]},
    ]


class FakeModelState(FakeGenerate):
    """A model in a given state."""

    state: ModelState

    def model_state(self, model: Any) -> ModelState:
        return self.state


def test_props_describe_the_model():
    defaults = GenerationDefaults(sampling={"seed": 42, "top_k": 7}, max_tokens=9)
    card = replace(CARD, defaults=defaults, own_name="llama.gguf")
    generate = FakeModelState(cards=(card,))
    generate.state = ModelState(name=CARD.id, phase="unloaded", stats=STATS, parallel=3)
    props = send_request(generate, "GET", "/props").json
    settings = props["default_generation_settings"]
    assert (props["total_slots"], props["model_alias"], props["is_sleeping"]) == (3, CARD.id, True)
    assert props["model_path"] == "llama.gguf"
    assert settings["n_ctx"] == CARD.context_length
    assert (settings["params"]["seed"], settings["params"]["top_k"]) == (42, 7)
    assert settings["params"]["n_predict"] == 9
    assert send_request(generate, "GET", "/props?model=other").status == 404
    assert send_request(generate, "POST", "/props", {}).status == 405


def test_slots_are_busy_while_sequences_run():
    generate = FakeModelState()
    generate.state = ModelState(name=CARD.id, phase="ready", stats=STATS, parallel=3)
    slots = send_request(generate, "GET", "/slots").json
    assert STATS.running == 2
    assert [slot["is_processing"] for slot in slots] == [True, True, False]
    assert [slot["id"] for slot in slots] == [0, 1, 2]
    assert "params" not in slots[0]
