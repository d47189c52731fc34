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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.api.fields import invalid_request, unsupported_value
from app.api.openai.chat import build_conversation, build_tool_options
from app.api.openai.sampling import build_template_options, build_thinking
from app.api.schema.messages import Message
from app.api.schema.tokenization import DETOKENIZE, TOKENIZE, ConversationBody, TokenizeBody
from app.core.ports import Generate, Models, ResolvedModel
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.http.body import RequestBodies, is_json
from app.http.responses import JsonObject, encode_long_array, json_response

# The fields that may contain the text (named as in vLLM, llama.cpp and other servers), and the
# default of add_special for each.
TEXT_FIELDS = {"prompt": True, "content": False, "text": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """The input to tokenize: text, or the conversation of a request.

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
        async with self._bodies.receive_json(request.scope, request.receive) as body:
            model, parsed = await body.read(
                partial(self._find_model, request),
                lambda data, model: parse_tokenize(data, model.card.id),
            )
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
                lambda data, _: parse_detokenize(data),
            )
            text = await self._models.detokenize(model, ids)
            # the first name is used by llama.cpp and Ollama, the second by vLLM
            return json_response({"content": text, "prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        return json_response(await self._models.get_tokenizer_info(await self._find_model(request)))


def parse_tokenize(data: bytes | bytearray, model: str) -> TokenizeRequest:
    """Parses the JSON body of POST /tokenize. Raises AppError(INVALID) for an invalid request."""
    body = TOKENIZE.decode(data)
    names = (*TEXT_FIELDS, "messages")
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid_request(
            given[1] if given else "prompt",
            f"the body must contain exactly one of {', '.join(names)}",
        )
    parsed = TokenizeRequest(
        with_pieces=body.with_pieces or False, return_token_strs=body.return_token_strs or False
    )
    if body.messages is not None:
        if body.add_special_tokens:
            raise unsupported_value("add_special_tokens", "true", (False,))
        return replace(parsed, request=build_conversation_request(body, body.messages, model))
    (name,) = given
    return replace(
        parsed, text=getattr(body, name), add_special=_get_add_special(body, TEXT_FIELDS[name])
    )


def parse_detokenize(data: bytes | bytearray) -> tuple[int, ...]:
    """Parses the body of POST /detokenize, which is an object, or the bare array that /v1/tokenize
    returns for text. Raises AppError(INVALID) for an invalid request."""
    if data.lstrip()[:1] == b"[":
        data = b'{"tokens":' + data + b"}"
    return tuple(DETOKENIZE.decode(data).tokens)


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


def _get_add_special(body: TokenizeBody, default: bool) -> bool:
    """Special tokens that occur in the text are always recognized."""
    values = [value for value in (body.add_special_tokens, body.add_special) if value is not None]
    if len(set(values)) > 1:
        raise invalid_request(
            "add_special",
            "add_special and add_special_tokens are aliases but differ: keep one of them",
        )
    return values[0] if values else default


def build_conversation_request(
    body: ConversationBody, messages: list[Message], model: str
) -> GenerateRequest:
    """Converts the fields of a chat completion that affect its prompt."""
    chat = body.to_chat(messages)
    tool_options = build_tool_options(chat)
    thinking = build_thinking(chat)
    options = build_template_options(body.chat_template_kwargs, thinking)
    if body.add_generation_prompt is False:
        options = {**options, "add_generation_prompt": False}
    return GenerateRequest(
        model=model,
        prompt=build_conversation(messages),
        tools=tool_options.tools,
        tool_choice=tool_options.choice,
        parallel_tool_calls=tool_options.parallel,
        reasoning=thinking,
        chat_template_kwargs=options,
    )
