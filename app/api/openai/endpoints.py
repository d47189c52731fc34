"""The OpenAI dialect: chat completions, completions, models.

Knows which path speaks which part of it. Requests are read in openai_request, answers are written
in openai_chat and openai_completion. Must not know: anything of what stands between.
"""

import os
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.generate_endpoint import EventStream, GenerateEndpoint, JsonBody, ParsedRequest
from app.api.models import render_model_state
from app.api.openai.chat import ChatChunkEncoder, collect_chat
from app.api.openai.common_fields import model_not_found
from app.api.openai.completions import CompletionChunkEncoder, collect_completion
from app.api.openai.output import CompletionMetadata
from app.api.openai.request import ParsedCompletionRequest, parse_chat, parse_completion
from app.core.model_state import ModelState
from app.core.ports import Generate, ModelCard
from app.core.settings import Settings
from app.http.body import MAX_CHAT_VALUES, RequestBodies
from app.http.responses import JsonObject, json_response


def routes(generate: Generate, settings: Settings, bodies: RequestBodies) -> list[Route]:
    def cards_by_id() -> dict[str, ModelCard]:
        return {card.id: card for card in generate.list_models()}

    def render_models() -> list[JsonObject]:
        states = {state.name: state for state in generate.list_model_states()}
        return [_render_model(card, states[card.id]) for card in generate.list_models()]

    def prepare_chat(body: object, _caller: str) -> ParsedRequest:
        cards = cards_by_id()
        wish = parse_chat(body, cards)
        head = _build_metadata("chatcmpl", wish, cards[wish.request.model])
        if wish.stream:
            return ParsedRequest(request=wish.request, reply=EventStream(ChatChunkEncoder(head)))
        return ParsedRequest(
            request=wish.request, reply=JsonBody(lambda said: collect_chat(head, said))
        )

    def prepare_completion(body: object, _caller: str) -> ParsedRequest:
        cards = cards_by_id()
        wish = parse_completion(body, cards)
        head = _build_metadata("cmpl", wish, cards[wish.request.model])
        if wish.stream:
            return ParsedRequest(
                request=wish.request, reply=EventStream(CompletionChunkEncoder(head))
            )
        return ParsedRequest(
            request=wish.request, reply=JsonBody(lambda said: collect_completion(head, said))
        )

    async def list_models(request: Request) -> Response:
        await generate.discover("")
        return json_response({"object": "list", "data": render_models()})

    async def retrieve_model(request: Request) -> Response:
        id_ = request.path_params["id"]
        await generate.discover(id_)
        for model in render_models():
            if model["id"] == id_:
                return json_response(model)
        raise model_not_found(id_)

    return [
        Route(
            "/v1/chat/completions",
            GenerateEndpoint(prepare_chat, generate, settings, bodies, max_values=MAX_CHAT_VALUES),
            methods=["POST"],
        ),
        Route(
            "/v1/completions",
            GenerateEndpoint(prepare_completion, generate, settings, bodies),
            methods=["POST"],
        ),
        Route("/v1/models", list_models, methods=["GET"]),
        # Ids may hold slashes, as the names of repositories do.
        Route("/v1/models/{id:path}", retrieve_model, methods=["GET"]),
    ]


def _build_metadata(
    prefix: str, parsed: ParsedCompletionRequest, card: ModelCard
) -> CompletionMetadata:
    request = parsed.request
    return CompletionMetadata(
        id=f"{prefix}-{os.urandom(12).hex()}",
        created=int(time.time()),
        model=request.model,
        fingerprint=card.system_fingerprint,
        num_prompts=parsed.num_prompts,
        n=parsed.n,
        best_of=request.n,
        logprobs=parsed.logprobs,
        return_token_ids=parsed.return_token_ids,
        echo=request.echo,
        include_usage=parsed.include_usage,
        continuous_usage=parsed.continuous_usage,
        tier=parsed.tier,
    )


def _render_model(card: ModelCard, state: ModelState) -> JsonObject:
    """OpenAI's four, what a client has to know besides, and how the model stands."""
    return {
        **render_model_state(state),
        "created": card.created,
        "owned_by": "mlxrunner",
        "context_length": card.context_length,
    }
