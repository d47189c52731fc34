"""Ollama's Python library: chats, streams, tools, schemas, vectors, and the models on the disk.

pip install ollama
OLLAMA_HOST=http://localhost:8080 python examples/ollama_chat.py
"""

import json

import ollama


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


def main() -> None:
    client = ollama.Client()
    model = client.list().models[0].model
    assert model, "the server lists no model"
    print("model", model)

    # the details of a model
    shown = client.show(model)
    assert shown.modelinfo
    assert shown.capabilities
    architecture = shown.modelinfo["general.architecture"]
    print("context", shown.modelinfo[f"{architecture}.context_length"])

    # a chat, non-streamed and streamed: with a seed, both have the same text
    messages = [{"role": "user", "content": "Say hello."}]
    options = {"seed": 7, "num_predict": 24, "num_ctx": 1024}
    whole = client.chat(model, messages, options=options)
    assert whole.done
    assert whole.done_reason in ("stop", "length")
    assert whole.prompt_eval_count
    assert whole.eval_count
    pieces = list(client.chat(model, messages, options=options, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].done
    assert not any(piece.done for piece in pieces[:-1])
    print("said", whole.message.content)

    # a response that follows a schema
    colour = {"enum": ["red", "green", "blue"]}
    schema = {
        "type": "object",
        "properties": {"colour": colour},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = client.chat(model, messages, format=schema, options={"temperature": 0})
    assert json.loads(answer.message.content or "")["colour"] in colour["enum"]
    assert client.generate(model, "An object:", format="json", options=options).response[0] == "{"

    # `context` continues the conversation from its token IDs
    first = client.generate(model, "Say hello.", options=options)
    assert first.context
    second = client.generate(model, "And again.", context=first.context, options=options)
    assert second.context
    assert list(second.context[: len(first.context)]) == list(first.context)
    assert client.generate(model, "Once upon", raw=True, options=options).context is None

    # Tools: a result is matched to its call by the name of the function.
    if "tools" in shown.capabilities:
        asked = [{"role": "user", "content": "What is 2 + 3? Use the tool."}]
        reply = client.chat(model, asked, tools=[add], options={"temperature": 0})
        for call in reply.message.tool_calls or ():
            assert call.function.name == "add"
            print("called", call.function.arguments)
        result = {"role": "tool", "tool_name": "add", "content": "5"}
        called = {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
        }
        client.chat(model, [*asked, called, result], tools=[add], options={"num_predict": 8})

    # embeddings, whose length is 1
    vectors = client.embed(model, ["one", "two"]).embeddings
    assert len(vectors) == 2
    assert abs(sum(x * x for x in vectors[0]) - 1) < 1e-3
    assert client.embeddings(model, "one").embedding

    # errors
    for wrong in ("no-such-model", "../../etc/passwd"):
        try:
            client.chat(wrong, messages)
        except ollama.ResponseError as error:
            assert error.status_code == 404, error
            assert "not found" in error.error
        else:
            raise AssertionError("a model that does not exist answered")
    try:
        client.chat(model, messages, options={"temperature": "hot"})
    except ollama.ResponseError as error:
        assert error.status_code == 400
        assert "temperature" in error.error

    # load a model, keep it loaded, unload it
    client.generate(model, keep_alive="10m")
    assert model in [one.model for one in client.ps().models]
    print("loaded until", client.ps().models[0].expires_at)


if __name__ == "__main__":
    main()
