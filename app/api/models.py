"""Model management for administrators: /v1/models/load and /v1/models/unload.

Knows: the two request bodies, the JSON form of a model's state. Must not know: model loading,
authorization, which is checked by middleware.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.fields import Fields
from app.api.openai.request import read_keep_alive
from app.core.model_state import ModelState
from app.core.ports import Generate, Models
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

    return [
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
