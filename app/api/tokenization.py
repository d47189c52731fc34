"""Tokenization endpoints: /v1/tokenize, /v1/detokenize and /tokenizer_info. As in vLLM and
llama.cpp, the first two are also available without /v1.

Knows: the formats of three clients. Must not know: tokenizers, templates.

Ollama's client for its MLX runner sends plain text, with any content type except JSON, and expects
a bare array. Clients of vLLM (for example lm-evaluation-harness) and llama.cpp send JSON, and
expect an object with `tokens`. The format of this object is compatible with both.

Wire formats: ollama's x/mlxrunner/client.go, vLLM's serve/tokenize/protocol.py, llama.cpp's
tools/server/README.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.fields import Fields, as_array, as_token_ids, invalid_request
from app.api.openai.messages import build_conversation
from app.api.openai.reasoning import build_thinking
from app.api.openai.sampling import build_template_options
from app.api.openai.tools import build_tool_options
from app.api.schema.fields import decode_fields
from app.api.schema.openai import CHAT
from app.api.schema.reasoning import THINKING_BUDGET_FIELDS
from app.core.ports import Generate, Models, ResolvedModel
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.http.body import RequestBodies, is_json
from app.http.responses import JsonObject, encode_long_array, json_response

# The fields that may contain the text (named as in vLLM, llama.cpp and other servers), and the
# default of add_special for each.
TEXT_FIELDS = {"prompt": True, "content": False, "text": True}

# The fields of a chat completion that affect its prompt.
PROMPT_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "reasoning",
    "enable_thinking",
    "thinking",
    *THINKING_BUDGET_FIELDS,
    "chat_template_kwargs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """The input to tokenize: a text, or the conversation of a request.

    add_special: whether to add special tokens such as the beginning-of-sequence token. with_pieces:
    whether to return the ID and text of each token (llama.cpp's with_pieces). return_token_strs:
    whether to return the tokens' texts in addition to their IDs (vLLM's return_token_strs).
    """

    text: str = ""
    add_special: bool = True
    request: GenerateRequest | None = None
    with_pieces: bool = False
    return_token_strs: bool = False


def routes(
    generate: Generate, models: Models, settings: Settings, bodies: RequestBodies
) -> list[Route]:
    api = _TokenizationApi(models, bodies)
    tokenize, detokenize = ("/v1/tokenize", "/tokenize"), ("/v1/detokenize", "/detokenize")
    return [
        *(Route(path, api.tokenize, methods=["POST"]) for path in tokenize),
        *(Route(path, api.detokenize, methods=["POST"]) for path in detokenize),
        Route("/tokenizer_info", api.tokenizer_info, methods=["GET"]),
    ]


class _TokenizationApi:
    def __init__(self, models: Models, bodies: RequestBodies) -> None:
        self._models = models
        self._bodies = bodies

    async def _find_model(self, request: Request, named: str | None = None) -> ResolvedModel:
        """Returns the model specified in the body or the query. named: the name in the body; None
        if it is not set."""
        return await self._models.resolve(named or request.query_params.get("model"))

    async def tokenize(self, request: Request) -> Response:
        if is_json(request.scope):
            return await self._tokenize_json(request)
        async with self._bodies.receive(request.scope, request.receive) as body:
            try:
                text = body.take_data().decode()
            except UnicodeDecodeError as error:
                raise invalid_request(None, f"the body is not valid UTF-8: {error}") from None
            return json_response(
                list(await self._models.tokenize(await self._find_model(request), text))
            )

    async def _tokenize_json(self, request: Request) -> Response:
        def read(content: object, model: ResolvedModel) -> tuple[ResolvedModel, TokenizeRequest]:
            return model, parse_tokenize(content, model.card.id)

        async with self._bodies.receive_json(request.scope, request.receive) as body:
            model, parsed = await body.read(partial(self._find_model, request), read)
            if parsed.request is not None:
                ids = await self._models.tokenize_chat(model, parsed.request)
            else:
                ids = await self._models.tokenize(
                    model, parsed.text, add_special_tokens=parsed.add_special
                )
            raw = (
                await self._models.get_token_bytes(model, ids)
                if parsed.with_pieces or parsed.return_token_strs
                else ()
            )
            write = partial(render_tokens, parsed, ids, raw, model.card.context_length)
            return json_response(await self._bodies.workers.run(write, size=8 * len(ids)))

    async def detokenize(self, request: Request) -> Response:
        async with self._bodies.receive_json(request.scope, request.receive) as body:
            model, ids = await body.read(
                partial(self._find_model, request),
                lambda content, model: (model, parse_detokenize(content)),
            )
            text = await self._models.detokenize(model, ids)
            # the first name is used by llama.cpp and Ollama, the second by vLLM
            return json_response({"content": text, "prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        return json_response(await self._models.get_tokenizer_info(await self._find_model(request)))


def parse_tokenize(body: object, model: str) -> TokenizeRequest:
    """Parses the JSON body of POST /tokenize. Raises AppError(INVALID) for an invalid request."""
    fields = Fields.from_value(body)
    fields.string("model")
    given = [name for name in (*TEXT_FIELDS, "messages") if fields.value(name) is not None]
    if len(given) != 1:
        names = ", ".join((*TEXT_FIELDS, "messages"))
        raise invalid_request(
            given[1] if given else "prompt", f"the body must contain exactly one of {names}"
        )
    pieces = fields.boolean("with_pieces") or False
    texts = fields.boolean("return_token_strs") or False
    if given == ["messages"]:
        request = read_conversation_request(fields, model)
        parsed = TokenizeRequest(request=request, with_pieces=pieces, return_token_strs=texts)
    else:
        (name,) = given
        parsed = TokenizeRequest(
            text=fields.required_string(name),
            add_special=_add_special(fields, TEXT_FIELDS[name]),
            with_pieces=pieces,
            return_token_strs=texts,
        )
    fields.check_unknown()
    return parsed


def parse_detokenize(body: object) -> tuple[int, ...]:
    """Parses the body of POST /detokenize, which is an object, or the bare array that /v1/tokenize
    returns for a text. Raises AppError(INVALID) for an invalid request."""
    bare = as_array(body)
    if bare is not None:
        return as_token_ids(bare, "tokens")
    fields = Fields.from_value(body)
    fields.string("model")
    fields.required("tokens")
    tokens = fields.array("tokens") or []
    fields.check_unknown()
    return as_token_ids(tokens, "tokens")


def render_tokens(
    parsed: TokenizeRequest, ids: Sequence[int], raw: Sequence[bytes], context: int
) -> JsonObject:
    """Returns an object in vLLM's format; llama.cpp's clients read only `tokens`. raw: the bytes of
    each token, if the request asks for token texts."""
    texts = [bytes_.decode(errors="replace") for bytes_ in raw]
    tokens: list[Any] = list(ids)
    if parsed.with_pieces:
        tokens = [
            {"id": id, "piece": _render_piece(bytes_)} for id, bytes_ in zip(ids, raw, strict=True)
        ]
    return {
        "count": len(ids),
        "max_model_len": context,
        "tokens": encode_long_array(tokens),
        "token_strs": encode_long_array(texts) if parsed.return_token_strs else None,
    }


def _render_piece(raw: bytes) -> str | list[int]:
    """Renders a token as in llama.cpp: as text, or as a list of bytes if it is not valid UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _add_special(fields: Fields, default: bool) -> bool:
    """Reads the option under vLLM's or llama.cpp's name. Special tokens that occur in the text are
    always recognized."""
    fields.reject("parse_special", True)
    names = ("add_special_tokens", "add_special")
    values = [value for name in names if (value := fields.boolean(name)) is not None]
    if len(set(values)) > 1:
        raise invalid_request(
            "add_special",
            "add_special and add_special_tokens are aliases but differ: keep one of them",
        )
    return values[0] if values else default


def read_conversation_request(fields: Fields, model: str) -> GenerateRequest:
    """Reads the fields of a chat completion that affect its prompt."""
    fields.reject("add_special_tokens", False)
    fields.reject("continue_final_message", False)
    fields.reject("chat_template")
    fields.reject("media_io_kwargs", {})
    fields.reject("mm_processor_kwargs", {})
    body = decode_fields(fields, CHAT, PROMPT_FIELDS)
    tool_options = build_tool_options(body)
    thinking = build_thinking(body)
    options = build_template_options(body.chat_template_kwargs, thinking)
    if fields.boolean("add_generation_prompt") is False:
        options = {**options, "add_generation_prompt": False}
    return GenerateRequest(
        model=model,
        prompt=build_conversation(body.messages),
        tools=tool_options.tools,
        tool_choice=tool_options.choice,
        parallel_tool_calls=tool_options.parallel,
        reasoning=thinking,
        chat_template_kwargs=options,
    )
