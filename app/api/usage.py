"""Usage per API key: /v1/usage.

Knows: the JSON form of the counters. Must not know: how usage is counted and limited.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.core.usage import UsageCounters
from app.http.auth import get_caller, is_admin
from app.http.responses import JsonObject, json_response


def usage_routes(usage: UsageCounters) -> list[Route]:
    async def show(request: Request) -> Response:
        """A caller sees its own usage, and an admin that of all callers."""
        own = get_caller(request.scope)
        names = sorted({own, *usage.snapshot()}) if is_admin(request.scope) else [own]
        data = [_render_caller(usage, name) for name in names]
        return json_response({"object": "list", "data": data})

    return [Route("/v1/usage", show, methods=["GET"])]


def _render_caller(usage: UsageCounters, name: str) -> JsonObject:
    used, limits = usage.get(name), usage.get_limits(name)
    return {
        "object": "usage",
        "key": name or None,
        "requests": used.requests,
        "prompt_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
        "generated_tokens": used.generated_tokens,
        "today": {"date": used.date, "tokens": used.today_tokens},
        "limits": {
            "daily_tokens": limits.daily_tokens,
            "requests_per_minute": limits.requests_per_minute,
        },
    }
