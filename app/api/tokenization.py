"""Texts, conversations and token ids: /v1/tokenize, /v1/detokenize and /tokenizer_info, the first
two also without /v1, where vLLM and llama.cpp have them.

Knows three clients. Ollama's for its MLX runner sends a text as it is, under whatever content type
but JSON, and reads a bare array. Those of vLLM (lm-evaluation-harness for one) and of llama.cpp
send JSON, and read `tokens` out of an object that each of them can read. Must not know: how texts
become ids, templates.

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
from app.api.openai.common_fields import model_not_found
from app.api.openai.messages import read_conversation
from app.api.openai.sampling import read_template_options, read_thinking
from app.api.openai.tools import read_tool_options
from app.core.errors import AppError, ErrorKind
from app.core.ports import Generate, ModelCard
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.http.body import RequestBodies, is_json
from app.http.responses import JsonObject, encode_long_array, json_response

# Where a text may be, and whether its ids begin as the model's texts begin: vLLM's name for it ·
# llama.cpp's · what other servers have.
TEXT_FIELDS = {"prompt": True, "content": False, "text": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """What is to become ids: a text, or the conversation of a request. add_special: begin as the
    model's texts begin. with_pieces: each token with its id and its text (llama.cpp's with_pieces).
    return_token_strs: the tokens' texts beside their ids (vLLM's return_token_strs)."""

    model: str | None
    text: str = ""
    add_special: bool = True
    request: GenerateRequest | None = None
    with_pieces: bool = False
    return_token_strs: bool = False


def routes(generate: Generate, settings: Settings, bodies: RequestBodies) -> list[Route]:
    def card(model: str | None) -> ModelCard:
        cards = {card.id: card for card in generate.list_models()}
        if not cards:
            raise AppError(ErrorKind.LOADING, "no model is available yet: try again in a moment")
        if model is None:
            return next(iter(cards.values()))
        if model not in cards:
            raise model_not_found(model)
        return cards[model]

    async def find_model(request: Request, named: str = "") -> str | None:
        """The model that the body or the query names. named: by the body."""
        model = named or request.query_params.get("model")
        if model is not None:
            await generate.discover(model)
        return model

    async def tokenize(request: Request) -> Response:
        if is_json(request.scope):
            return await tokenize_json(request)
        async with bodies.receive(request.scope, request.receive) as body:
            try:
                text = body.take_data().decode()
            except UnicodeDecodeError as error:
                raise invalid_request(None, f"the body is not valid UTF-8: {error}") from None
            return json_response(list(await generate.tokenize(text, await find_model(request))))

    async def tokenize_json(request: Request) -> Response:
        async def find(named: str) -> tuple[str | None, ModelCard]:
            model = await find_model(request, named)
            return model, card(model)

        def read(
            content: object, found: tuple[str | None, ModelCard]
        ) -> tuple[TokenizeRequest, ModelCard]:
            model, served = found
            return parse_tokenize(content, model, default=served.id), served

        async with bodies.receive_json(request.scope, request.receive) as body:
            parsed, served = await body.read(find, read)
            model = parsed.model
            if parsed.request is not None:
                ids = await generate.tokenize_chat(parsed.request)
            else:
                ids = await generate.tokenize(
                    parsed.text, model, add_special_tokens=parsed.add_special
                )
            raw = (
                await generate.get_token_bytes(ids, model)
                if parsed.with_pieces or parsed.return_token_strs
                else ()
            )
            write = partial(render_tokens, parsed, ids, raw, served.context_length)
            return json_response(await bodies.workers.run(write, size=8 * len(ids)))

    async def detokenize(request: Request) -> Response:
        async with bodies.receive_json(request.scope, request.receive) as body:
            ids, model = await body.read(
                partial(find_model, request),
                lambda content, model: (parse_detokenize(content), model),
            )
            text = await generate.detokenize(ids, model)
            # llama.cpp's name and Ollama's · vLLM's
            return json_response({"content": text, "prompt": text})

    async def tokenizer_info(request: Request) -> Response:
        return json_response(await generate.get_tokenizer_info(await find_model(request)))

    return [
        *(Route(path, tokenize, methods=["POST"]) for path in ("/v1/tokenize", "/tokenize")),
        *(Route(path, detokenize, methods=["POST"]) for path in ("/v1/detokenize", "/detokenize")),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    ]


def parse_tokenize(body: object, model: str | None, *, default: str) -> TokenizeRequest:
    """The JSON body of POST /tokenize. default: the model where none is named. Raises
    AppError(INVALID)."""
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
        request = _read_conversation_request(fields, model or default)
        parsed = TokenizeRequest(
            model=model, request=request, with_pieces=pieces, return_token_strs=texts
        )
    else:
        (name,) = given
        parsed = TokenizeRequest(
            model=model,
            text=fields.required_string(name),
            add_special=_add_special(fields, TEXT_FIELDS[name]),
            with_pieces=pieces,
            return_token_strs=texts,
        )
    fields.reject_unknown()
    return parsed


def parse_detokenize(body: object) -> tuple[int, ...]:
    """The body of POST /detokenize: an object, or the bare array that /v1/tokenize answers a text
    with. Raises AppError(INVALID)."""
    bare = as_array(body)
    if bare is not None:
        return as_token_ids(bare, "tokens")
    fields = Fields.from_value(body)
    fields.string("model")
    fields.required("tokens")
    tokens = fields.array("tokens") or []
    fields.reject_unknown()
    return as_token_ids(tokens, "tokens")


def render_tokens(
    parsed: TokenizeRequest, ids: Sequence[int], raw: Sequence[bytes], context: int
) -> JsonObject:
    """vLLM's object; llama.cpp's clients look for `tokens` alone. raw: the bytes of each token,
    where its text was asked for."""
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
    """As llama.cpp writes a token that is no whole text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _add_special(fields: Fields, default: bool) -> bool:
    """Under vLLM's name or llama.cpp's. Special tokens that are written out in a text are always
    recognised."""
    fields.reject("parse_special", True)
    names = ("add_special_tokens", "add_special")
    said = [value for name in names if (value := fields.boolean(name)) is not None]
    if len(set(said)) > 1:
        raise invalid_request(
            "add_special",
            "add_special and add_special_tokens are aliases but differ: keep one of them",
        )
    return said[0] if said else default


def _read_conversation_request(fields: Fields, model: str) -> GenerateRequest:
    """A chat completion, as far as its prompt depends on it."""
    fields.reject("add_special_tokens", False)
    fields.reject("continue_final_message", False)
    fields.reject("chat_template")
    fields.reject("media_io_kwargs", {})
    fields.reject("mm_processor_kwargs", {})
    toolbox = read_tool_options(fields)
    thinking = read_thinking(fields)
    options = read_template_options(fields, thinking)
    if fields.boolean("add_generation_prompt") is False:
        options = {**options, "add_generation_prompt": False}
    return GenerateRequest(
        model=model,
        prompt=read_conversation(fields),
        tools=toolbox.tools,
        tool_choice=toolbox.choice,
        parallel_tool_calls=toolbox.parallel,
        reasoning=thinking,
        chat_template_kwargs=options,
    )
