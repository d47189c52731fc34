"""LlamaIndex over Ollama's API: a chat, a stream, a completion, an error.

pip install llama-index-llms-ollama
OLLAMA_HOST=http://localhost:8080 python examples/llama_index_ollama.py
"""

import os

import ollama
from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama


def main() -> None:
    name = ollama.Client().list().models[0].model
    assert name is not None
    # the context length is read from the server unless it is given
    llm = Ollama(
        model=name,
        base_url=os.environ.get("OLLAMA_HOST", "http://localhost:8080"),
        temperature=0,
        request_timeout=120,
        additional_kwargs={"num_predict": 32},
    )
    print("context", llm.metadata.context_window)

    said = llm.chat([ChatMessage(role="user", content="Say hello.")]).message.content
    pieces = [p.delta for p in llm.stream_chat([ChatMessage(role="user", content="Say hello.")])]
    assert "".join(piece or "" for piece in pieces) == said
    print("said", said)
    assert llm.complete("Say hello.").text is not None

    # An unknown model is an error.
    try:
        Ollama(model="no-such-model", base_url=llm.base_url).complete("Say hello.")
    except ollama.ResponseError as error:
        assert error.status_code == 404
    else:
        raise AssertionError("an unknown model was found")


if __name__ == "__main__":
    main()
