"""Models in memory: /v1/models/load and /v1/models/unload, for whoever runs the server.

Knows the two bodies and what a model's state looks like in JSON. Must not know: how models are
loaded, who may ask (that is decided before a request gets here).
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.fields import Fields
from app.api.openai.common_fields import read_keep_alive
from app.core.model_state import ModelState
from app.core.ports import Generate
from app.core.settings import Settings
from app.http.body import RequestBodies
from app.http.responses import JsonObject, json_response


def routes(generate: Generate, settings: Settings, bodies: RequestBodies) -> list[Route]:
    async def load(request: Request) -> Response:
        fields = Fields.from_value(await bodies.read_json(request.scope, request.receive))
        model, keep_alive = fields.required_string("model"), read_keep_alive(fields)
        fields.reject_unknown()
        await generate.discover(model)
        return json_response(render_model_state(await generate.load(model, keep_alive)))

    async def unload(request: Request) -> Response:
        fields = Fields.from_value(await bodies.read_json(request.scope, request.receive))
        model = fields.required_string("model")
        fields.reject_unknown()
        return json_response(render_model_state(await generate.unload(model)))

    return [
        Route("/v1/models/load", load, methods=["POST"]),
        Route("/v1/models/unload", unload, methods=["POST"]),
    ]


def render_model_state(state: ModelState) -> JsonObject:
    """What `GET /v1/models` says beside what OpenAI does. expires_at: Unix time, null while the
    model is in use, not loaded, or stays for ever."""
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
