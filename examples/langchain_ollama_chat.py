"""LangChain over Ollama's API: a chain that streams, structured output, vectors, an error.

pip install langchain-ollama
OLLAMA_HOST=http://localhost:8080 python examples/langchain_ollama_chat.py
"""

from typing import Literal

import ollama
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_ollama import ChatOllama, OllamaEmbeddings
from pydantic import BaseModel, ConfigDict


class Choice(BaseModel):
    """A colour."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green", "blue"]


def main() -> None:
    name = ollama.Client().list().models[0].model
    assert name is not None
    # the library first looks for the name in the list of models
    model = ChatOllama(
        model=name, temperature=0, num_predict=48, num_ctx=1024, validate_model_on_init=True
    )

    # Non-streamed, and streamed through a chain.
    reply = model.invoke([HumanMessage("Say hello.")])
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["input_tokens"] > 0
    assert reply.response_metadata["done_reason"] in ("stop", "length")
    print("said", reply.content)
    chain = ChatPromptTemplate.from_messages([("human", "Say {what}.")]) | model
    pieces = list(chain.stream({"what": "hello"}))
    assert all(isinstance(piece, AIMessageChunk) for piece in pieces)
    assert "".join(str(piece.content) for piece in pieces) == reply.content

    # Structured output.
    structured = model.with_structured_output(Choice, method="json_schema")
    choice = structured.invoke("Which colour has the sky?")
    assert isinstance(choice, Choice)
    print("chose", choice.colour)

    # A call and its result in the history. LangChain does not send the IDs of calls back.
    call = {"name": "get_weather", "args": {"city": "Oslo"}, "id": "1", "type": "tool_call"}
    history = [
        HumanMessage("What is the weather in Oslo?"),
        AIMessage(content="", tool_calls=[call]),
        ToolMessage("It is sunny in Oslo.", tool_call_id="1"),
    ]
    assert isinstance(model.invoke(history), AIMessage)

    # Embeddings.
    vectors = OllamaEmbeddings(model=name).embed_documents(["one", "two"])
    assert len(vectors) == 2
    print("vectors of", len(vectors[0]))

    # An unknown model is an error.
    try:
        ChatOllama(model="no-such-model").invoke("Say hello.")
    except ollama.ResponseError as error:
        assert error.status_code == 404
    else:
        raise AssertionError("an unknown model was found")


if __name__ == "__main__":
    main()
