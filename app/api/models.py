"""Model management for administrators: /v1/models/load, /v1/models/unload, /v1/models/defaults,
/v1/models/preview.

Knows: the request bodies, the JSON form of a model's state, defaults and preview. Must not know:
model loading, where defaults are stored, authorization, which is checked by middleware.
"""

import math

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.fields import Fields, invalid_request
from app.api.openai.request import read_keep_alive
from app.core.model_files import ModelDefaults
from app.core.models import DownloadPreview, ModelState
from app.core.ports import Generate, Models
from app.core.sampling_params import INT32_MAX, SAMPLING_KNOBS
from app.core.settings import Settings
from app.http.body import RequestBodies
from app.http.responses import JsonObject, json_response


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    async def load(request: Request) -> Response:
        fields = Fields.from_value(await bodies.read_json(request.scope, request.receive))
        model, keep_alive = fields.required_string("model"), read_keep_alive(fields)
        fields.check_unknown()
        state = await models.load(await models.resolve(model), keep_alive)
        return json_response(render_model_state(state))

    async def unload(request: Request) -> Response:
        fields = Fields.from_value(await bodies.read_json(request.scope, request.receive))
        model = fields.required_string("model")
        fields.check_unknown()
        return json_response(render_model_state(await models.unload(await models.resolve(model))))

    async def defaults(request: Request) -> Response:
        fields = Fields.from_value(await bodies.read_json(request.scope, request.receive))
        model = await models.resolve(fields.required_string("model"))
        given = fields.nested("defaults")
        fields.check_unknown()
        saved = None
        if given is not None:
            saved = await models.set_defaults(model, read_defaults(given, model.card.id))
        return json_response(render_defaults(models.get_defaults(model), saved))

    async def preview(request: Request) -> Response:
        fields = Fields.from_value(await bodies.read_json(request.scope, request.receive))
        model = fields.required_string("model")
        fields.check_unknown()
        return json_response(render_preview(await models.library.preview(model)))

    return [
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


# longer names would not fit in a list
_MAX_ALIAS_CHARS = 200
_MAX_ALIASES = 16


def read_defaults(fields: Fields, model: str) -> ModelDefaults:
    """Reads all defaults of a model. A field that is absent resets its value."""
    aliases, system = _read_aliases(fields), fields.string("system")
    sampling: dict[str, float | int] = {}
    for knob in SAMPLING_KNOBS:
        if knob.kind is int:
            value = fields.integer(knob.name, int(knob.low), int(knob.high))
        else:
            value = fields.number(knob.name, knob.low, knob.high)
        if value is not None:
            sampling[knob.name] = value
    found = ModelDefaults(
        name=model,
        aliases=aliases,
        system=system if system is not None and system.strip() else None,
        context=fields.integer("context", 2, INT32_MAX),
        keep_alive=read_keep_alive(fields),
        max_tokens=fields.integer("max_tokens", 1, INT32_MAX),
        sampling=sampling,
    )
    fields.check_unknown()
    return found


def _read_aliases(fields: Fields) -> tuple[str, ...]:
    path = fields.path("aliases")
    found = fields.strings("aliases", _MAX_ALIASES)
    for alias in found:
        if not (alias.isprintable() and alias == alias.strip() and len(alias) <= _MAX_ALIAS_CHARS):
            raise invalid_request(
                path, f"{path} must be names of 1 to {_MAX_ALIAS_CHARS} printable characters"
            )
    if len(set(found)) < len(found):
        raise invalid_request(path, f"{path} contains a name twice")
    return tuple(found)


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
