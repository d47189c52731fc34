"""Haystack: texts and calls over both of OpenAI's APIs, documents found by their embeddings,
tokens counted before a request.

pip install haystack-ai
OPENAI_BASE_URL=http://localhost:8080/v1 python examples/haystack_pipeline.py
"""

import os
from typing import Literal

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server

from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.token_counters import OpenAITokenCounter
from haystack.tools import tool
from openai import OpenAI

URL = os.environ["OPENAI_BASE_URL"]

TEXTS = ("Tea grows in the hills.", "It rains in Rome.", "The prefix cache keeps keys and values.")


@tool
def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """Returns today's weather in a city."""
    return f"It rains in {city}."


def main() -> None:
    served = OpenAI().models.list().data[0].id
    hello = [ChatMessage.from_user("Hello!")]
    for kind, limit in (
        (OpenAIChatGenerator, "max_completion_tokens"),
        (OpenAIResponsesChatGenerator, "max_output_tokens"),
    ):
        brief = {"temperature": 0, limit: 80}
        writer = kind(model=served, api_base_url=URL, generation_kwargs=brief)

        # Text, non-streamed and streamed.
        whole = writer.run(hello)["replies"][0].text
        chunks: list[StreamingChunk] = []
        streamed = writer.run(hello, streaming_callback=chunks.append)["replies"][0].text
        print(f"{kind.__name__}: {whole!r} in {len(chunks)} chunks")
        assert "".join(chunk.content for chunk in chunks) == streamed == whole != ""

        # A required call, its result, and the response to the result.
        forced = {**brief, "tool_choice": "required", "parallel_tool_calls": False}
        caller = kind(model=served, api_base_url=URL, generation_kwargs=forced, tools=[get_weather])
        question = ChatMessage.from_user("Does it rain in Oslo?")
        call = caller.run([question])["replies"][0]
        (asked,) = call.tool_calls
        result = ChatMessage.from_tool(get_weather.invoke(**asked.arguments), origin=asked)
        answer = writer.run([question, call, result])["replies"][0]
        print(f"{kind.__name__}: {asked.arguments}, then {answer.text!r}")
        assert asked.arguments["city"] in ("Oslo", "Rome")
        assert answer.text

    # A pipeline: find the text nearest to a question, and insert it into the prompt.
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    documents = [Document(content=text) for text in TEXTS]
    embedder = OpenAIDocumentEmbedder(model=served, api_base_url=URL, progress_bar=False)
    store.write_documents(embedder.run(documents)["documents"])
    template = "{% for found in documents %}{{ found.content }}{% endfor %} {{ question }}"
    pipeline = Pipeline()
    pipeline.add_component("embedder", OpenAITextEmbedder(model=served, api_base_url=URL))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=1))
    pipeline.add_component(
        "prompt",
        ChatPromptBuilder([ChatMessage.from_user(template)], required_variables="*"),
    )
    pipeline.add_component(
        "writer",
        OpenAIChatGenerator(model=served, api_base_url=URL, generation_kwargs={"temperature": 0}),
    )
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "writer.messages")
    out = pipeline.run(
        {"embedder": {"text": TEXTS[1]}, "prompt": {"question": "Does it?"}},
        include_outputs_from={"retriever"},
    )
    (found,) = out["retriever"]["documents"]
    print(f"found: {found.content!r}, {out['writer']['replies'][0].text!r}")
    assert found.content == TEXTS[1]

    # The number of tokens in a conversation, counted with the model's own template.
    count = OpenAITokenCounter(served, api_base_url=URL).count(hello)
    print(f"tokens: {count}")
    assert (
        count
        == OpenAIChatGenerator(model=served, api_base_url=URL)
        .run(hello)["replies"][0]
        .meta["usage"]["prompt_tokens"]
    )


if __name__ == "__main__":
    main()
