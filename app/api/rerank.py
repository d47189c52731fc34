"""POST /v1/rerank: scores documents for a query.

Knows: the request and response formats of Jina's, Cohere's and llama.cpp's endpoint, which differ
only in optional fields. Must not know: how scores are computed, the context length.

Wire formats: Jina's API reference, "Reranker"; Cohere's API reference, "Rerank" (v2); llama.cpp's
server, "/v1/rerank". A response has the fields of all of them. A document that is too long for the
model is truncated, as in Cohere's API.
"""

from array import array
from dataclasses import dataclass
from uuid import uuid4

from starlette.routing import Route

from app.api.embeddings import EmbedEndpoint
from app.api.fields import invalid_request, quote_value
from app.api.openai.request import get_keep_alive
from app.api.schema.embeddings import RERANK, RerankBody
from app.core.ports import Generate, Models
from app.core.requests import Embeddings, EmbedInput, EmbedRequest
from app.core.settings import Settings
from app.http.body import RequestBodies
from app.http.responses import JsonObject

# the limit of Cohere's API
MAX_DOCUMENTS = 1000

# v1: Jina, llama.cpp and vLLM. v2: Cohere. The others: llama.cpp.
PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRerankRequest:
    """A valid request. top_n: the number of documents to return, those with the highest scores;
    None for all. return_documents: whether the response contains the texts."""

    request: EmbedRequest
    top_n: int | None
    return_documents: bool


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    endpoint = EmbedEndpoint(generate, models, bodies, parse=parse_ranking, render=render_ranking)
    return [Route(path, endpoint, methods=["POST"]) for path in PATHS]


def parse_ranking(data: bytes | bytearray, model: str) -> ParsedRerankRequest:
    """Parses the body of a request. Raises AppError(INVALID) for an invalid request."""
    body = RERANK.decode(data)
    if not body.query:
        raise invalid_request("query", "query must not be empty")
    return ParsedRerankRequest(
        request=EmbedRequest(
            model=model,
            inputs=_build_documents(body),
            query=body.query,
            keep_alive=get_keep_alive(body.keep_alive, body.ttl),
        ),
        top_n=body.top_n,
        return_documents=body.return_documents or False,
    )


def render_ranking(parsed: ParsedRerankRequest, found: Embeddings) -> JsonObject:
    """Builds the response body. The documents with the highest scores are first."""
    scores = [array("f", vector)[0] for vector in found.vectors]
    # documents with equal scores keep their order
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: parsed.top_n]
    results: list[JsonObject] = []
    for index in order:
        result: JsonObject = {"index": index, "relevance_score": scores[index]}
        if parsed.return_documents:
            result["document"] = {"text": parsed.request.inputs[index].content}
        results.append(result)
    return {
        "id": f"rerank-{uuid4().hex}",
        "object": "list",
        "model": parsed.request.model,
        "usage": {"prompt_tokens": found.prompt_tokens, "total_tokens": found.prompt_tokens},
        "results": results,
    }


def _build_documents(body: RerankBody) -> tuple[EmbedInput, ...]:
    """Converts `documents`, or `texts` as in llama.cpp."""
    name, documents = "documents", body.documents
    if documents is None and body.texts is not None:
        name, documents = "texts", body.texts
    if not documents:
        shown = quote_value(documents)
        raise invalid_request(name, f"{name} must be a list of texts, not {shown}")
    if len(documents) > MAX_DOCUMENTS:
        raise invalid_request(
            name, f"{name} must contain at most {MAX_DOCUMENTS} texts, not {len(documents)}"
        )
    texts = [one if isinstance(one, str) else one.text for one in documents]
    for index, text in enumerate(texts):
        if not text:
            at = f"{name}.{index}"
            raise invalid_request(at, f"{at} must be a string or an object with a text, not ''")
    return tuple(
        EmbedInput(content=text, param=f"{name}.{index}") for index, text in enumerate(texts)
    )
