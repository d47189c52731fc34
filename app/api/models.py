"""Model management for administrators: /v1/models/load, /v1/models/unload, /v1/models/defaults,
/v1/models/preview, and vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter.

Knows: the request bodies, the JSON form of a model's state, defaults and preview. Must not know:
model loading, where defaults are stored, authorization, which is checked by middleware.
"""

import math

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.api.fields import invalid_request
from app.api.openai.request import get_keep_alive
from app.api.openai.sampling import to_tuple
from app.api.schema.models import (
    DEFAULTS,
    LOAD,
    LOAD_ADAPTER,
    MODEL,
    UNLOAD_ADAPTER,
    DefaultValues,
)
from app.core.model_files import ModelDefaults
from app.core.models import DownloadPreview, ModelState
from app.core.ports import Generate, Models
from app.core.sampling_params import SAMPLING_KNOBS
from app.core.settings import Settings
from app.http.body import RequestBodies
from app.http.responses import JsonObject, json_response

# longer names would not fit in a list
_MAX_ALIAS_CHARS = 200


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    async def load(request: Request) -> Response:
        body = await bodies.decode(request.scope, request.receive, LOAD.decode)
        keep_alive = get_keep_alive(body.keep_alive, body.ttl)
        state = await models.load(await models.resolve(body.model), keep_alive)
        return json_response(render_model_state(state))

    async def unload(request: Request) -> Response:
        body = await bodies.decode(request.scope, request.receive, MODEL.decode)
        state = await models.unload(await models.resolve(body.model))
        return json_response(render_model_state(state))

    async def defaults(request: Request) -> Response:
        body = await bodies.decode(request.scope, request.receive, DEFAULTS.decode)
        model = await models.resolve(body.model)
        saved = None
        if body.defaults is not None:
            given = build_defaults(body.defaults, model.card.id)
            saved = await models.set_defaults(model, given)
        return json_response(render_defaults(models.get_defaults(model), saved))

    async def preview(request: Request) -> Response:
        body = await bodies.decode(request.scope, request.receive, MODEL.decode)
        return json_response(render_preview(await models.library.preview(body.model)))

    async def load_adapter(request: Request) -> Response:
        body = await bodies.decode(request.scope, request.receive, LOAD_ADAPTER.decode)
        model = await models.resolve(body.model)
        await models.load_adapter(model, body.lora_name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(request: Request) -> Response:
        body = await bodies.decode(request.scope, request.receive, UNLOAD_ADAPTER.decode)
        # without a model, the first one that has the adapter
        model = await models.resolve(body.model or body.lora_name)
        await models.unload_adapter(model, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return [
        Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
        Route("/v1/models/preview", preview, methods=["POST"]),
        Route("/v1/models/defaults", defaults, methods=["POST"]),
        Route("/v1/models/load", load, methods=["POST"]),
        Route("/v1/models/unload", unload, methods=["POST"]),
    ]


def render_model_state(state: ModelState) -> JsonObject:
    """Returns the fields that `GET /v1/models` adds to OpenAI's fields. expires_at: the Unix time
    of expiry; null while the model is in use, is not loaded, or stays loaded forever."""
    return {
        "id": state.name,
        "object": "model",
        "state": state.phase,
        "progress": state.progress if state.phase in ("loading", "queued") else None,
        "pinned": state.pinned,
        "memory": state.stats.allocated_bytes,
        "expires_at": None if state.expires_at is None else int(state.expires_at),
        "error": state.error,
    }


def build_defaults(values: DefaultValues, model: str) -> ModelDefaults:
    """Returns all defaults of a model. Raises AppError(INVALID)."""
    system = values.system
    sampling = {knob.name: getattr(values, knob.name) for knob in SAMPLING_KNOBS}
    return ModelDefaults(
        name=model,
        aliases=_check_aliases(to_tuple(values.aliases)),
        system=system if system is not None and system.strip() else None,
        context=values.context,
        keep_alive=get_keep_alive(values.keep_alive, values.ttl),
        max_tokens=values.max_tokens,
        sampling={name: value for name, value in sampling.items() if value is not None},
    )


def _check_aliases(aliases: tuple[str, ...]) -> tuple[str, ...]:
    path = "defaults.aliases"
    for alias in aliases:
        if not (alias.isprintable() and alias == alias.strip() and len(alias) <= _MAX_ALIAS_CHARS):
            raise invalid_request(
                path, f"{path} must be names of 1 to {_MAX_ALIAS_CHARS} printable characters"
            )
    if len(set(aliases)) < len(aliases):
        raise invalid_request(path, f"{path} contains a name twice")
    return aliases


def render_defaults(defaults: ModelDefaults, saved: bool | None) -> JsonObject:
    """saved: whether they are in the configuration file; None if they were not changed."""
    keep_alive = defaults.keep_alive
    values = {
        "aliases": list(defaults.aliases) or None,
        "system": defaults.system,
        "context": defaults.context,
        "keep_alive": -1 if keep_alive == math.inf else keep_alive,
        "max_tokens": defaults.max_tokens,
        **defaults.sampling,
    }
    return {
        "id": defaults.name,
        "object": "model.defaults",
        "defaults": {name: value for name, value in values.items() if value is not None},
        "saved": saved,
    }


def render_preview(preview: DownloadPreview) -> JsonObject:
    return {
        "id": preview.name,
        "object": "model.preview",
        "commit": preview.commit,
        "size": preview.size,
        "missing": preview.missing,
        "context_length": preview.context_length,
        "memory": {"needed": preview.memory_needed, "available": preview.memory_available},
        "disk": {"needed": preview.missing, "available": preview.disk_available},
        "fits": preview.problem is None,
        "problem": preview.problem,
    }
