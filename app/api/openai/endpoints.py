"""The OpenAI dialect: chat completions, completions, models.

Knows: the path of each endpoint. Must not know: request parsing (app/api/openai/request.py),
response formats (chat.py and completions.py in the same folder), generation.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.generate_endpoint import (
    EventStream,
    GenerateEndpoint,
    JsonBody,
    ParsedRequest,
    UnfinishedRequest,
)
from app.api.models import render_model_state
from app.api.openai.output import (
    ChatChunkEncoder,
    ChunkEncoder,
    CompletionChunkEncoder,
    CompletionMetadata,
    collect_chat,
    collect_completion,
)
from app.api.openai.request import ParsedCompletionRequest, parse_chat, parse_completion
from app.core.events import OutputEvent
from app.core.models import ModelState
from app.core.ports import Generate, ModelCard, Models, ResolvedModel
from app.core.settings import ReasoningField, Settings
from app.http.auth import is_admin
from app.http.body import RequestBodies
from app.http.responses import JsonObject, json_response


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    def prepare_chat(
        body: bytearray, caller: str, card: ModelCard
    ) -> ParsedRequest | UnfinishedRequest:
        parsed = parse_chat(body, card.id, card.logprobs_limit)
        metadata = _build_metadata("chatcmpl", parsed, card, settings.reasoning_field)

        async def add_prompt(model: ResolvedModel) -> ParsedRequest:
            ids = await models.tokenize_chat(model, replace(parsed.request, caller=caller))
            prompt = await models.detokenize(model, ids)
            shown = replace(metadata, verbose_prompt=prompt)
            return _prepare(parsed, shown, ChatChunkEncoder, collect_chat)

        if parsed.verbose or (parsed.verbose is None and settings.debug):
            return add_prompt
        return _prepare(parsed, metadata, ChatChunkEncoder, collect_chat)

    def prepare_completion(body: bytearray, _caller: str, card: ModelCard) -> ParsedRequest:
        parsed = parse_completion(body, card.id, card.logprobs_limit)
        metadata = _build_metadata("cmpl", parsed, card, settings.reasoning_field)
        return _prepare(parsed, metadata, CompletionChunkEncoder, collect_completion)

    return [
        Route(
            "/v1/chat/completions",
            GenerateEndpoint(prepare_chat, generate, models, settings, bodies),
            methods=["POST"],
        ),
        Route(
            "/v1/completions",
            GenerateEndpoint(prepare_completion, generate, models, settings, bodies),
            methods=["POST"],
        ),
        *_model_routes(models),
    ]


def _prepare(
    parsed: ParsedCompletionRequest,
    metadata: CompletionMetadata,
    encoder: Callable[[CompletionMetadata], ChunkEncoder],
    collect: Callable[[CompletionMetadata, Sequence[OutputEvent]], JsonObject],
) -> ParsedRequest:
    if parsed.stream:
        reply = EventStream(encoder(metadata), parsed.return_progress)
    else:
        reply = JsonBody(partial(collect, metadata))
    return ParsedRequest(request=parsed.request, reply=reply)


def _model_routes(models: Models) -> list[Route]:
    async def list_models(request: Request) -> Response:
        await models.rescan()
        states = {state.name: state for state in models.list_model_states()}
        admin = is_admin(request.scope)
        data = [
            _render_model(card, states[card.parent or card.id], admin=admin)
            for card in models.list_models()
        ]
        return json_response({"object": "list", "data": data})

    async def retrieve_model(request: Request) -> Response:
        model = await models.resolve(request.path_params["id"])
        state = models.model_state(model)
        return json_response(_render_model(model.card, state, admin=is_admin(request.scope)))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        # Model IDs may contain slashes, like repository names.
        Route("/v1/models/{id:path}", retrieve_model, methods=["GET"]),
    ]


def _build_metadata(
    prefix: str,
    parsed: ParsedCompletionRequest,
    card: ModelCard,
    reasoning_field: ReasoningField,
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
        return_progress=parsed.return_progress,
        tier=parsed.tier,
        reasoning_field=reasoning_field,
    )


def _render_model(card: ModelCard, state: ModelState, *, admin: bool) -> JsonObject:
    """Renders OpenAI's four fields, the model's properties, and its current state. admin: whether
    the caller may see the model's folder."""
    return {
        **render_model_state(state),
        "id": card.id,
        "created": card.created,
        "owned_by": "mlxrunner",
        "context_length": card.context_length,
        **({"aliases": card.aliases} if card.aliases else {}),
        **({"parent": card.parent} if card.parent is not None else {}),
        # the name of OpenRouter and of several clients
        "input_modalities": ["text", "image"] if card.vision else ["text"],
        # vLLM's names
        "max_model_len": card.context_length,
        **({"root": str(card.folder)} if admin and card.folder is not None else {}),
    }
