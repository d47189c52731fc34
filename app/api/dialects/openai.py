"""The OpenAI dialect: chat completions, completions, models.

Knows which path speaks which part of it. Requests are read in openai_request, answers are written
in openai_chat and openai_completion. Must not know: anything of what stands between.
"""

import os
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.body import RequestBodies
from app.api.dialects.lifecycle import told
from app.api.dialects.openai_caller import unknown_model
from app.api.dialects.openai_chat import ChatChunks, collect_chat
from app.api.dialects.openai_completion import CompletionChunks, collect_completion
from app.api.dialects.openai_reply import Head
from app.api.dialects.openai_request import Wish, parse_chat, parse_completion
from app.api.exchange import Ask, EventStream, GenerateEndpoint, WholeBody
from app.api.wire import JsonObject, json_reply
from app.core.ports import Generate, ModelCard
from app.core.residents import ModelState
from app.core.settings import Settings


def routes(generate: Generate, settings: Settings, bodies: RequestBodies) -> list[Route]:
    def served() -> dict[str, ModelCard]:
        return {card.id: card for card in generate.models()}

    def described() -> list[JsonObject]:
        states = {state.name: state for state in generate.states()}
        return [_model(card, states[card.id]) for card in generate.models()]

    def ask_chat(body: object) -> Ask:
        cards = served()
        wish = parse_chat(body, cards)
        head = _head("chatcmpl", wish, cards[wish.request.model])
        if wish.stream:
            return Ask(request=wish.request, reply=EventStream(ChatChunks(head)))
        return Ask(request=wish.request, reply=WholeBody(lambda said: collect_chat(head, said)))

    def ask_completion(body: object) -> Ask:
        cards = served()
        wish = parse_completion(body, cards)
        head = _head("cmpl", wish, cards[wish.request.model])
        if wish.stream:
            return Ask(request=wish.request, reply=EventStream(CompletionChunks(head)))
        return Ask(
            request=wish.request, reply=WholeBody(lambda said: collect_completion(head, said))
        )

    async def list_models(request: Request) -> Response:
        await generate.look_for("")
        return json_reply({"object": "list", "data": described()})

    async def retrieve_model(request: Request) -> Response:
        id_ = request.path_params["id"]
        await generate.look_for(id_)
        for model in described():
            if model["id"] == id_:
                return json_reply(model)
        raise unknown_model(id_)

    return [
        Route(
            "/v1/chat/completions",
            GenerateEndpoint(ask_chat, generate, settings, bodies),
            methods=["POST"],
        ),
        Route(
            "/v1/completions",
            GenerateEndpoint(ask_completion, generate, settings, bodies),
            methods=["POST"],
        ),
        Route("/v1/models", list_models, methods=["GET"]),
        # Ids may hold slashes, as the names of repositories do.
        Route("/v1/models/{id:path}", retrieve_model, methods=["GET"]),
    ]


def _head(prefix: str, wish: Wish, card: ModelCard) -> Head:
    request = wish.request
    return Head(
        id=f"{prefix}-{os.urandom(12).hex()}",
        created=int(time.time()),
        model=request.model,
        fingerprint=card.fingerprint,
        prompts=wish.prompts,
        n=wish.n,
        made=request.n,
        logprobs=wish.logprobs,
        ids=wish.ids,
        echo=request.echo,
        include_usage=wish.include_usage,
        running_usage=wish.running_usage,
        tier=wish.tier,
    )


def _model(card: ModelCard, state: ModelState) -> JsonObject:
    """OpenAI's four, what a client has to know besides, and how the model stands."""
    return {
        **told(state),
        "created": card.created,
        "owned_by": "mlxrunner",
        "context_length": card.context_length,
    }
