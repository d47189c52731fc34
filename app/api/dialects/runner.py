"""The runner's own dialect: what the Go client of Ollama's MLX runner speaks.

POST /completion answers in JSON lines; /v1/tokenize and /v1/detokenize turn text into ids and
back. Knows that client's habits: it writes zero for "not set", keeps all defaults to itself (so
the model's own must not show through here) and prints the body of every reply that is not 200.
Wire format: ollama x/mlxrunner/client.go of March 2026 (bbbad9768).
"""

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.body import RequestBodies
from app.api.exchange import Ask, GenerateEndpoint, JsonLines
from app.api.fields import INT32_MAX, INT64, Fields, as_array, as_ids, invalid
from app.api.wire import MANNERS, JsonObject, json_reply, line_frame
from app.core.errors import AppError, Kind
from app.core.events import Finish, Spoken, TextDelta
from app.core.ports import Generate
from app.core.requests import GenerateRequest, SamplingValue
from app.core.settings import Settings

DONE_REASONS: Mapping[str, int] = {"stop": 0, "length": 1}


def routes(generate: Generate, settings: Settings, bodies: RequestBodies) -> list[Route]:
    def ask(body: object) -> Ask:
        cards = generate.models()
        if not cards:
            raise AppError(Kind.LOADING, "no model is served yet: try again in a moment")
        return Ask(request=parse(body, cards[0].id), reply=JsonLines(Lines()))

    async def which(request: Request) -> str | None:
        model = request.query_params.get("model")
        if model is not None:
            await generate.look_for(model)
        return model

    async def tokenize(request: Request) -> Response:
        async with bodies.receive(request.scope, request.receive) as body:
            try:
                text = body.data.decode()
            except UnicodeDecodeError as error:
                raise invalid(None, f"the body is not valid UTF-8: {error}") from None
            return json_reply(list(await generate.tokenize(text, await which(request))))

    async def detokenize(request: Request) -> Response:
        async with bodies.receive_json(request.scope, request.receive) as body:
            ids = await body.run(partial(parse_ids, await body.json()))
            return json_reply({"content": await generate.detokenize(ids, await which(request))})

    return [
        Route("/completion", GenerateEndpoint(ask, generate, settings, bodies), methods=["POST"]),
        Route("/v1/tokenize", tokenize, methods=["POST"]),
        Route("/v1/detokenize", detokenize, methods=["POST"]),
    ]


def parse(body: object, model: str) -> GenerateRequest:
    """The body of POST /completion. Raises AppError(INVALID)."""
    # Go's decoder ignores case, and later versions of the client send capitals.
    fields = Fields.of(body).any_case()
    prompt = fields.required_string("prompt")
    options = (fields.nested("options") or Fields({}, "options")).any_case()
    request = GenerateRequest(
        model=model,
        prompt=prompt,
        sampling=_sampling(options),
        max_tokens=_max_tokens(options),
        stop=options.strings("stop", 16),
        reuse=fields.boolean("cache_prompt") is not False,
        keep=_keep(options),
    )
    options.close()
    fields.close()
    return request


def parse_ids(body: object) -> tuple[int, ...]:
    """The body of POST /v1/detokenize: an object, or the bare array that /v1/tokenize answers
    with. Raises AppError(INVALID)."""
    bare = as_array(body)
    if bare is not None:
        return as_ids(bare, "tokens")
    fields = Fields.of(body)
    fields.required("tokens")
    tokens = fields.array("tokens") or []
    fields.close()
    return as_ids(tokens, "tokens")


def _sampling(options: Fields) -> dict[str, SamplingValue]:
    """Every knob, set or not: whoever sends this has defaults of its own."""
    top_p = options.number("top_p", 0, 1)
    top_k = options.integer("top_k", -1, INT32_MAX)
    repeat_last_n = options.integer("repeat_last_n", -1, INT32_MAX)
    seed = options.integer("seed", *INT64)
    return {
        "temperature": options.number("temperature", 0, 100) or 0.0,
        "top_p": top_p or 1.0,
        "top_k": max(0, top_k or 0),
        "min_p": options.number("min_p", 0, 1) or 0.0,
        "repetition_penalty": options.number("repeat_penalty", 0, 10) or 1.0,
        "presence_penalty": options.number("presence_penalty", -2, 2) or 0.0,
        "frequency_penalty": options.number("frequency_penalty", -2, 2) or 0.0,
        "repeat_last_n": repeat_last_n or -1,
        "logit_bias": (),
        # The client's way to say "any" is a negative seed.
        "seed": None if seed is None or seed < 0 else seed,
    }


def _max_tokens(options: Fields) -> int | None:
    """None is the rest of the context, which is what every number below one means."""
    max_tokens = options.integer("max_tokens", *INT64)
    num_predict = options.integer("num_predict", *INT64)
    limit = max_tokens or num_predict or 0
    return limit if limit > 0 else None


def _keep(options: Fields) -> int:
    """Negative is the whole prompt; zero is what "not set" comes to here."""
    num_keep = options.integer("num_keep", *INT64)
    n_keep = options.integer("n_keep", *INT64)
    return num_keep or n_keep or 0


class Lines:
    """Frames of an answer: one line per piece of text, then one with the counters."""

    def __init__(self) -> None:
        self._finished = False

    def feed(self, event: Spoken) -> bytes:
        if isinstance(event, TextDelta):
            return line_frame(_line(Content=event.text)) if event.text else b""
        # a plain prompt is answered by nothing but text
        assert isinstance(event, Finish)
        self._finished = True
        return line_frame(
            _line(
                Done=True,
                DoneReason=DONE_REASONS[event.reason],
                PromptEvalCount=event.usage.prompt_tokens,
                PromptEvalDuration=event.timings.prompt_ns,
                EvalCount=event.usage.completion_tokens,
                EvalDuration=event.timings.eval_ns,
            )
        )

    def end(self) -> bytes:
        assert self._finished, "an answer ended without Finish"
        return b""

    def fail(self, error: AppError) -> bytes:
        status = HTTPStatus(MANNERS[error.kind].status)
        told = {
            "StatusCode": status.value,
            "Status": f"{status.value} {status.phrase}",
            "error": error.message,
        }
        return line_frame(_line(Error=told))


def _line(**said: object) -> JsonObject:
    """All keys stand in every line, as Go's encoder writes them."""
    return {
        "Content": "",
        "Done": False,
        "DoneReason": 0,
        "PromptEvalCount": 0,
        "PromptEvalDuration": 0,
        "EvalCount": 0,
        "EvalDuration": 0,
        "Error": None,
        **said,
    }
