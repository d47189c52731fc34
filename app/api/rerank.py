"""POST /v1/rerank: scores documents for a query.

Knows: the request and response formats of Jina's, Cohere's and llama.cpp's endpoint, which differ
only in optional fields. Must not know: how scores are computed, the context length.

Wire formats: Jina's API reference, "Reranker"; Cohere's API reference, "Rerank" (v2); llama.cpp's
server, "/v1/rerank". A response has the fields of all of them. The end of a document that is too
long for the model is ignored, as with Cohere.
"""

from array import array
from dataclasses import dataclass, replace
from functools import partial
from typing import cast
from uuid import uuid4

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.api.fields import Fields, as_array, invalid_request, quote_value
from app.api.generate_endpoint import resolve_requested
from app.api.openai.request import check_model, read_keep_alive
from app.core.ports import Generate, Models, ResolvedModel
from app.core.requests import Embeddings, EmbedInput, EmbedRequest
from app.core.sampling_params import INT32_MAX
from app.core.settings import Settings
from app.http.auth import get_caller, is_admin
from app.http.body import Body, RequestBodies
from app.http.responses import JsonObject
from app.http.streaming import cancel_on_disconnect, send_json

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
    endpoint = RerankEndpoint(generate, models, bodies)
    return [Route(path, endpoint, methods=["POST"]) for path in PATHS]


class RerankEndpoint:
    """An ASGI application for the endpoint. It cancels the request when the client disconnects."""

    def __init__(self, generate: Generate, models: Models, bodies: RequestBodies) -> None:
        self._generate = generate
        self._models = models
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._bodies.receive_json(scope, receive) as body:

            async def exchange(send: Send) -> None:
                model, parsed = await self._parse_body(body)
                request = replace(parsed.request, caller=get_caller(scope), admin=is_admin(scope))
                found = await self._generate.embed(request, model)
                await send_json(render_ranking(parsed, found), scope, send)

            await cancel_on_disconnect(receive, send, exchange)

    async def _parse_body(self, body: Body) -> tuple[ResolvedModel, ParsedRerankRequest]:
        return await body.read(
            partial(resolve_requested, self._models),
            lambda content, model: (model, parse_ranking(content, model.card.id)),
        )


def parse_ranking(body: object, model: str) -> ParsedRerankRequest:
    """Parses the body of a request. Raises AppError(INVALID) for an invalid request."""
    fields = Fields.from_value(body)
    check_model(fields)
    documents = _read_documents(fields)
    parsed = ParsedRerankRequest(
        request=EmbedRequest(
            model=model,
            inputs=documents,
            query=_read_query(fields),
            keep_alive=read_keep_alive(fields),
        ),
        top_n=fields.integer("top_n", 1, INT32_MAX),
        return_documents=fields.boolean("return_documents") or False,
    )
    fields.integer("max_tokens_per_doc", 1, INT32_MAX)  # Cohere's; the model's context applies
    fields.check_unknown()
    return parsed


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


def _read_query(fields: Fields) -> str:
    query = fields.required_string("query")
    if not query:
        raise invalid_request("query", "query must not be empty")
    return query


def _read_documents(fields: Fields) -> tuple[EmbedInput, ...]:
    """Reads `documents`, or `texts` as in llama.cpp: texts, or objects with a text."""
    name = "documents"
    value = fields.value("documents")
    texts = fields.value("texts")
    if value is None and texts is not None:
        name, value = "texts", texts
    items = as_array(value)
    if not items:
        raise invalid_request(name, f"{name} must be a list of texts, not {quote_value(value)}")
    if len(items) > MAX_DOCUMENTS:
        raise invalid_request(
            name, f"{name} must contain at most {MAX_DOCUMENTS} texts, not {len(items)}"
        )
    return tuple(_read_document(item, f"{name}.{index}") for index, item in enumerate(items))


def _read_document(value: object, at: str) -> EmbedInput:
    if isinstance(value, dict):
        fields = Fields.from_value(cast(object, value), at)
        text: object = fields.required_string("text")
        fields.ignore_unknown()
    else:
        text = value
    if not isinstance(text, str) or not text:
        raise invalid_request(
            at,
            f"{at} must be a text or an object with a text, not {quote_value(cast(object, value))}",
        )
    return EmbedInput(content=text, param=at)
