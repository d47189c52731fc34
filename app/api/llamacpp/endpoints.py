"""llama.cpp's dialect: the endpoints of its server that OpenAI's API does not have.

Knows: the path of each endpoint, llama.cpp's description of a server and its slots. Must not know:
request parsing (app/api/llamacpp/request.py), response formats (output.py in the same folder),
generation.

`/completion` also serves Ollama's runner. Its requests have all options in `options`, which
llama.cpp's never have.

Wire format: tools/server/README.md of llama.cpp of 2026-08.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.embeddings import (
    EmbedEndpoint,
    parse_native_embeddings,
    render_native_embeddings,
)
from app.api.fields import invalid_request
from app.api.generate_endpoint import (
    EventStream,
    GenerateEndpoint,
    JsonBody,
    ParsedRequest,
    UnfinishedRequest,
    read_request,
    resolve_requested,
)
from app.api.llamacpp.output import NativeChunkEncoder, NativeFormat, collect_native
from app.api.llamacpp.request import (
    NativeRequest,
    PromptParts,
    build_settings,
    parse_completion,
    parse_infill,
)
from app.api.ollama_runner import is_runner_request, prepare_runner_request
from app.api.openai.request import build_chat
from app.api.schema.openai import CHAT
from app.api.schema.tokenization import TEMPLATE
from app.api.tokenization import build_conversation_request
from app.core.distributions import get_own_version
from app.core.models import ModelState
from app.core.ports import Generate, ModelCard, Models, ResolvedModel
from app.core.requests import GenerateRequest, PromptBatch
from app.core.settings import Settings
from app.http.auth import get_caller, is_admin
from app.http.body import RequestBodies
from app.http.responses import JsonObject, json_response


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    api = _NativeApi(models, settings, bodies)
    complete = GenerateEndpoint(api.read_completion, generate, models, settings, bodies)
    infill = GenerateEndpoint(api.read_infill, generate, models, settings, bodies)
    embed = EmbedEndpoint(
        generate, models, bodies, parse=parse_native_embeddings, render=render_native_embeddings
    )
    return [
        Route("/completion", complete, methods=["POST"]),
        Route("/completions", complete, methods=["POST"]),
        Route("/infill", infill, methods=["POST"]),
        Route("/embedding", embed, methods=["POST"]),
        Route("/embeddings", embed, methods=["POST"]),
        Route("/apply-template", api.apply_template, methods=["POST"]),
        Route("/v1/chat/completions/input_tokens", api.count_tokens, methods=["POST"]),
        Route("/props", api.get_props, methods=["GET"]),
        Route("/slots", api.list_slots, methods=["GET"]),
    ]


class _NativeApi:
    """Endpoints that generate text, and those that describe the server or a prompt."""

    def __init__(self, models: Models, settings: Settings, bodies: RequestBodies) -> None:
        self._models = models
        self._settings = settings
        self._bodies = bodies

    def read_completion(
        self, data: bytearray, _caller: str, card: ModelCard
    ) -> ParsedRequest | UnfinishedRequest:
        """Parses a native completion, or a completion of Ollama's runner."""
        if is_runner_request(data):
            return prepare_runner_request(data, card)
        return partial(self._prepare, parse_completion(data, card))

    def read_infill(self, data: bytearray, _caller: str, card: ModelCard) -> UnfinishedRequest:
        return partial(self._prepare, parse_infill(data, card))

    async def _prepare(self, parsed: NativeRequest, model: ResolvedModel) -> ParsedRequest:
        """Tokenizes the texts of a request, because a prompt may mix texts and token IDs, and the
        response contains it with its special tokens."""
        request, shown = parsed.request, [str(parsed.request.prompt)]
        if not request.prompt:
            prompts = [await self._tokenize(model, parts) for parts in parsed.prompts]
            shown = [await self._models.detokenize(model, ids) for ids in prompts]
            prompt = PromptBatch(prompts=tuple(prompts)) if len(prompts) > 1 else prompts[0]
            request = replace(request, prompt=prompt)
        settings: JsonObject = parsed.settings
        if parsed.text_biases:
            biases = await self._read_biases(model, parsed)
            request = replace(request, sampling={**request.sampling, "logit_bias": biases})
            settings = {**build_settings(model.card, request), "stream": parsed.stream}
        if request.ignore_eos:
            ends = await self._list_ends(model)
            biases = cast("list[JsonObject]", settings["logit_bias"])
            settings = {**settings, "logit_bias": [*biases, *ends]}
        format = NativeFormat(
            model=model.card.id,
            prompts=shown,
            settings=settings,
            max_context=model.card.context_length,
            is_list=parsed.is_list,
            return_tokens=parsed.return_tokens,
            response_fields=parsed.response_fields,
            timings_per_token=parsed.timings_per_token,
            return_progress=parsed.return_progress,
        )
        reply = (
            EventStream(NativeChunkEncoder(format), all_progress=parsed.return_progress)
            if parsed.stream
            else JsonBody(partial(collect_native, format))
        )
        return ParsedRequest(request=request, reply=reply)

    async def _tokenize(self, model: ResolvedModel, parts: PromptParts) -> tuple[int, ...]:
        """Only text at the start gets the special tokens of a prompt."""
        ids: list[int] = []
        for place, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += await self._models.tokenize(model, part, add_special_tokens=place == 0)
        if not ids:
            raise invalid_request("prompt", "the prompt has no tokens")
        return tuple(ids)

    async def _list_ends(self, model: ResolvedModel) -> list[JsonObject]:
        """Returns the end-of-sequence tokens as llama.cpp does: as biases of minus infinity, which
        JSON writes as null."""
        text = (await self._models.get_tokenizer_info(model)).get("eos_token") or ""
        ids = await self._models.tokenize(model, text, add_special_tokens=False) if text else ()
        return [{"token": id_, "bias": None} for id_ in ids]

    async def _read_biases(
        self, model: ResolvedModel, parsed: NativeRequest
    ) -> tuple[tuple[int, float], ...]:
        biases: dict[int, float] = dict(cast("Any", parsed.request.sampling.get("logit_bias", ())))
        for text, bias in parsed.text_biases:
            ids = await self._models.tokenize(model, text, add_special_tokens=False)
            biases |= dict.fromkeys(ids, bias)
        return tuple(biases.items())

    async def apply_template(self, request: Request) -> Response:
        model, parsed = await self._read_chat(request, _read_template_request)
        return json_response({"prompt": await self._models.render_chat(model, parsed)})

    async def count_tokens(self, request: Request) -> Response:
        model, parsed = await self._read_chat(
            request, lambda data, name: build_chat(CHAT.decode(data), name).request
        )
        ids = await self._models.tokenize_chat(model, parsed)
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def _read_chat(
        self, request: Request, parse: Callable[[bytearray, str], GenerateRequest]
    ) -> tuple[ResolvedModel, GenerateRequest]:
        scope = request.scope
        async with self._bodies.receive_json(scope, request.receive) as body:
            model, parsed = await read_request(
                body, self._models, lambda data, card: parse(data, card.id)
            )
        return model, replace(parsed, caller=get_caller(scope), admin=is_admin(scope))

    async def get_props(self, request: Request) -> Response:
        model = await self._find_model(request)
        state = self._models.model_state(model)
        info = await self._models.get_tokenizer_info(model)
        return json_response(
            {
                "default_generation_settings": {
                    **_render_slot(0, model.card, is_processing=False),
                    "params": build_settings(model.card),
                },
                "total_slots": self._count_slots(state),
                "model_alias": model.card.id,
                "model_path": model.card.own_name or model.card.id,
                "modalities": {"vision": model.card.vision, "audio": False},
                "chat_template": info.get("chat_template") or "",
                "bos_token": info.get("bos_token") or "",
                "eos_token": info.get("eos_token") or "",
                "build_info": f"mlxrunner {get_own_version()}",
                "is_sleeping": state.phase in ("unloaded", "unloading"),
            }
        )

    async def list_slots(self, request: Request) -> Response:
        """The engine does not number its slots, so the first slots are reported as running."""
        model = await self._find_model(request)
        state = self._models.model_state(model)
        slots = range(self._count_slots(state))
        running = state.stats.running
        return json_response(
            [_render_slot(slot, model.card, is_processing=slot < running) for slot in slots]
        )

    async def _find_model(self, request: Request) -> ResolvedModel:
        return await resolve_requested(self._models, request.query_params.get("model"))

    def _count_slots(self, state: ModelState) -> int:
        return state.parallel or self._settings.parallel or 1


def _render_slot(slot: int, card: ModelCard, *, is_processing: bool) -> JsonObject:
    return {
        "id": slot,
        "n_ctx": card.context_length,
        "speculative": False,
        "is_processing": is_processing,
    }


def _read_template_request(data: bytearray, model: str) -> GenerateRequest:
    body = TEMPLATE.decode(data)
    return build_conversation_request(body, body.messages, model)
