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

from app.api.body import RequestBodies, is_json
from app.api.dialects.openai_caller import unknown_model
from app.api.dialects.openai_messages import read_conversation
from app.api.dialects.openai_thinking import read_template_options, read_thinking
from app.api.dialects.openai_tools import read_toolbox
from app.api.fields import Fields, as_array, as_ids, invalid
from app.api.wire import JsonObject, json_reply, long_array
from app.core.errors import AppError, Kind
from app.core.ports import Generate, ModelCard
from app.core.requests import GenerateRequest
from app.core.settings import Settings

# Where a text may be, and whether its ids begin as the model's texts begin: vLLM's name for it ·
# llama.cpp's · what other servers have.
TEXTS = {"prompt": True, "content": False, "text": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """What is to become ids: a text, or the conversation of a request. add_special: begin as the
    model's texts begin. pieces: each token with its id and its text (llama.cpp's with_pieces).
    texts: the tokens' texts beside their ids (vLLM's return_token_strs)."""

    model: str | None
    text: str = ""
    add_special: bool = True
    request: GenerateRequest | None = None
    pieces: bool = False
    texts: bool = False


def routes(generate: Generate, settings: Settings, bodies: RequestBodies) -> list[Route]:
    def card(model: str | None) -> ModelCard:
        cards = {card.id: card for card in generate.models()}
        if not cards:
            raise AppError(Kind.LOADING, "no model is available yet: try again in a moment")
        if model is None:
            return next(iter(cards.values()))
        if model not in cards:
            raise unknown_model(model)
        return cards[model]

    async def asked(request: Request, named: str = "") -> str | None:
        """The model that the body or the query names. named: by the body."""
        model = named or request.query_params.get("model")
        if model is not None:
            await generate.look_for(model)
        return model

    async def tokenize(request: Request) -> Response:
        if is_json(request.scope):
            return await tokenize_json(request)
        async with bodies.receive(request.scope, request.receive) as body:
            try:
                text = body.take().decode()
            except UnicodeDecodeError as error:
                raise invalid(None, f"the body is not valid UTF-8: {error}") from None
            return json_reply(list(await generate.tokenize(text, await asked(request))))

    async def tokenize_json(request: Request) -> Response:
        async def find(named: str) -> tuple[str | None, ModelCard]:
            model = await asked(request, named)
            return model, card(model)

        def read(
            content: object, found: tuple[str | None, ModelCard]
        ) -> tuple[TokenizeRequest, ModelCard]:
            model, served = found
            return parse(content, model, default=served.id), served

        async with bodies.receive_json(request.scope, request.receive) as body:
            parsed, served = await body.read(find, read)
            model = parsed.model
            if parsed.request is not None:
                ids = await generate.prompt_ids(parsed.request)
            else:
                ids = await generate.tokenize(parsed.text, model, add_special=parsed.add_special)
            raw = await generate.token_bytes(ids, model) if parsed.pieces or parsed.texts else ()
            write = partial(write_tokens, parsed, ids, raw, served.context_length)
            return json_reply(await bodies.workers.run(write, size=8 * len(ids)))

    async def detokenize(request: Request) -> Response:
        async with bodies.receive_json(request.scope, request.receive) as body:
            ids, model = await body.read(
                partial(asked, request), lambda content, model: (parse_ids(content), model)
            )
            text = await generate.detokenize(ids, model)
            # llama.cpp's name and Ollama's · vLLM's
            return json_reply({"content": text, "prompt": text})

    async def tokenizer_info(request: Request) -> Response:
        return json_reply(await generate.tokenizer_info(await asked(request)))

    return [
        *(Route(path, tokenize, methods=["POST"]) for path in ("/v1/tokenize", "/tokenize")),
        *(Route(path, detokenize, methods=["POST"]) for path in ("/v1/detokenize", "/detokenize")),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    ]


def parse(body: object, model: str | None, *, default: str) -> TokenizeRequest:
    """The JSON body of POST /tokenize. default: the model where none is named. Raises
    AppError(INVALID)."""
    fields = Fields.of(body)
    fields.string("model")
    given = [name for name in (*TEXTS, "messages") if fields.value(name) is not None]
    if len(given) != 1:
        names = ", ".join((*TEXTS, "messages"))
        raise invalid(
            given[1] if given else "prompt", f"the body must contain exactly one of {names}"
        )
    pieces = fields.boolean("with_pieces") or False
    texts = fields.boolean("return_token_strs") or False
    if given == ["messages"]:
        request = _conversation(fields, model or default)
        parsed = TokenizeRequest(model=model, request=request, pieces=pieces, texts=texts)
    else:
        (name,) = given
        parsed = TokenizeRequest(
            model=model,
            text=fields.required_string(name),
            add_special=_add_special(fields, TEXTS[name]),
            pieces=pieces,
            texts=texts,
        )
    fields.close()
    return parsed


def parse_ids(body: object) -> tuple[int, ...]:
    """The body of POST /detokenize: an object, or the bare array that /v1/tokenize answers a text
    with. Raises AppError(INVALID)."""
    bare = as_array(body)
    if bare is not None:
        return as_ids(bare, "tokens")
    fields = Fields.of(body)
    fields.string("model")
    fields.required("tokens")
    tokens = fields.array("tokens") or []
    fields.close()
    return as_ids(tokens, "tokens")


def write_tokens(
    parsed: TokenizeRequest, ids: Sequence[int], raw: Sequence[bytes], context: int
) -> JsonObject:
    """vLLM's object; llama.cpp's clients look for `tokens` alone. raw: the bytes of each token,
    where its text was asked for."""
    texts = [bytes_.decode(errors="replace") for bytes_ in raw]
    tokens: list[Any] = list(ids)
    if parsed.pieces:
        tokens = [{"id": id, "piece": _piece(bytes_)} for id, bytes_ in zip(ids, raw, strict=True)]
    return {
        "count": len(ids),
        "max_model_len": context,
        "tokens": long_array(tokens),
        "token_strs": long_array(texts) if parsed.texts else None,
    }


def _piece(raw: bytes) -> str | list[int]:
    """As llama.cpp writes a token that is no whole text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _add_special(fields: Fields, default: bool) -> bool:
    """Under vLLM's name or llama.cpp's. Special tokens that are written out in a text are always
    recognised."""
    fields.refuse("parse_special", True)
    names = ("add_special_tokens", "add_special")
    said = [value for name in names if (value := fields.boolean(name)) is not None]
    if len(set(said)) > 1:
        raise invalid(
            "add_special",
            "add_special and add_special_tokens are aliases but differ: keep one of them",
        )
    return said[0] if said else default


def _conversation(fields: Fields, model: str) -> GenerateRequest:
    """A chat completion, as far as its prompt depends on it."""
    fields.refuse("add_special_tokens", False)
    fields.refuse("continue_final_message", False)
    fields.refuse("chat_template")
    fields.refuse("media_io_kwargs", {})
    fields.refuse("mm_processor_kwargs", {})
    toolbox = read_toolbox(fields)
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
        thinking=thinking,
        template_options=options,
    )
