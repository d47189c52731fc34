"""OpenAI's requests: converts JSON to a generate request.

Knows: the fields of chat completions and completions, the prompts of completions (a text, token
IDs, or several of either). Must not know: response formats, the model's vocabulary, the context
length. The serving layer checks the vocabulary and the context length.

The other modules in this folder parse the values of shared fields. Each known field is either
supported or, if it would have an effect, rejected with an error that identifies the field. Unknown
fields follow the rule in app/api/unknown_fields.py.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from app.api.fields import INT32_MAX, Fields, as_array, as_token_ids, invalid_request, quote_value
from app.api.openai.messages import read_conversation
from app.api.openai.reasoning import read_thinking
from app.api.openai.sampling import (
    read_sampling,
    read_stop_conditions,
    read_template_options,
    read_verbosity,
)
from app.api.openai.structured_outputs import read_grammar
from app.api.openai.tools import read_tool_options
from app.api.openai.unsupported_fields import reject_unsupported_fields
from app.core import units
from app.core.requests import Conversation, GenerateRequest, Prompt, PromptBatch
from app.core.units import pluralize

# The maximum number of choices, and therefore prompts, per request. OpenAI has the same limit for
# `n`.
MAX_CHOICES = 128

IDENTIFIER_FIELDS = ("user", "safety_identifier", "prompt_cache_key")

# The only service tier of this server, with OpenAI's name for it.
SERVICE_TIER = "default"


def read_prompt(fields: Fields) -> Prompt:
    value: object = fields.required("prompt")
    if isinstance(value, str):
        return value
    items = as_array(value)
    if not items:
        wanted = "a string, an array of token IDs, or an array of these"
        raise invalid_request("prompt", f"prompt must be {wanted}, not {quote_value(value)}")
    if not isinstance(items[0], str | list):
        return as_token_ids(items, "prompt")
    if len(items) > MAX_CHOICES:
        raise invalid_request(
            "prompt", f"prompt must contain at most {MAX_CHOICES} prompts, not {len(items)}"
        )
    prompts = tuple(_read_prompt_item(item, f"prompt.{place}") for place, item in enumerate(items))
    return prompts[0] if len(prompts) == 1 else PromptBatch(prompts=prompts)


def read_n(fields: Fields, prompt: Prompt) -> int:
    """Reads `n`, the number of choices per prompt."""
    return check_choice_limit("n", fields.integer("n", 1, MAX_CHOICES) or 1, prompt)


def check_choice_limit(name: str, count: int, prompt: Prompt) -> int:
    """Returns `count`, the number of choices per prompt. Raises AppError(INVALID) if the total
    number of choices exceeds the limit."""
    prompts = count_prompts(prompt)
    if count * prompts > MAX_CHOICES:
        raise invalid_request(
            name,
            f"{name}: {count} for each of {pluralize(prompts, 'prompt')} makes "
            f"{count * prompts} choices; a request may have at most {MAX_CHOICES}",
        )
    return count


def count_prompts(prompt: Prompt) -> int:
    return len(prompt.prompts) if isinstance(prompt, PromptBatch) else 1


def _read_prompt_item(item: object, path: str) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    ids = as_array(item)
    if ids is None:
        raise invalid_request(
            path, f"{path} must be a string or an array of token IDs, not {quote_value(item)}"
        )
    if not ids:
        raise invalid_request(path, f"{path} must contain at least one token ID")
    return as_token_ids(ids, path)


DEFAULT_COMPLETION_MAX_TOKENS = 16  # OpenAI's default, for completions only
MAX_BEST_OF = 20
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletionRequest:
    """A valid request.

    num_prompts: the number of prompts. n: the number of choices returned per prompt. request.n is
    the number of choices generated, of which the most likely are returned. logprobs,
    return_token_ids: whether to include them in the response. include_usage: whether to end the
    stream with a chunk of token counts. continuous_usage: whether to add the token counts so far to
    every chunk with a choice. return_progress: whether chunks report the progress of the prefill.
    tier: the service tier to return; None omits it.
    """

    request: GenerateRequest
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    return_token_ids: bool
    num_prompts: int
    n: int
    return_progress: bool = False
    tier: str | None = None


def parse_chat(body: object, model: str) -> ParsedCompletionRequest:
    """Parses the body of POST /v1/chat/completions. Raises AppError(INVALID) for an invalid
    request."""
    fields = Fields.from_value(body).accept_camel_case()
    check_model(fields)
    conversation = read_continuation(fields, read_conversation(fields))
    newer = fields.integer("max_completion_tokens", 1)
    older = _read_max_tokens(fields, 1)
    tool_options = read_tool_options(fields)
    grammar = read_grammar(fields)
    thinking = read_thinking(fields)
    request = GenerateRequest(
        model=model,
        prompt=conversation,
        max_tokens=newer if newer is not None else older,
        n=read_n(fields, conversation),
        top_logprobs=_chat_logprobs(fields),
        tools=tool_options.tools,
        tool_choice=tool_options.choice,
        parallel_tool_calls=tool_options.parallel,
        # A required tool call leaves no text to constrain.
        grammar=None if tool_options.must_call else grammar,
        reasoning=thinking,
        verbosity=read_verbosity(fields, "text_verbosity"),
        chat_template_kwargs=read_template_options(fields, thinking),
    )
    # a reasoning budget is also enforced with a grammar
    limited = thinking.token_budget is not None
    constrained = grammar is not None or tool_options.constrained or limited
    parsed = _parse_common(fields, request, constrained=constrained)
    parsed = replace(parsed, tier=read_service_tier(fields))
    check_metadata(fields)
    check_identifiers(fields)
    _check_store(fields)
    _reject_unsupported(fields)
    reject_unsupported_fields(fields, "chat")
    fields.check_unknown()
    return parsed


def read_continuation(fields: Fields, conversation: Conversation) -> Conversation:
    """Applies `continue_final_message` and `add_generation_prompt`, which starts a new message. The
    rules are the same as in vLLM."""
    begins = fields.boolean("add_generation_prompt")
    if not fields.boolean("continue_final_message"):
        if begins is False:
            raise invalid_request(
                "add_generation_prompt",
                "add_generation_prompt: false requires continue_final_message: true",
            )
        return conversation
    if begins:
        raise invalid_request(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other: keep one of them",
        )
    last = conversation.messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        raise invalid_request(
            "continue_final_message",
            "continue_final_message requires that the last message is the assistant's, with text "
            "and without tool_calls",
        )
    return replace(conversation, continue_final=True)


def parse_completion(body: object, model: str) -> ParsedCompletionRequest:
    """Parses the body of POST /v1/completions. Raises AppError(INVALID) for an invalid request."""
    fields = Fields.from_value(body).accept_camel_case()
    check_model(fields)
    prompt = read_prompt(fields)
    echo = fields.boolean("echo") or False
    # zero tokens are useful with echo, which returns the prompt
    max_tokens = _read_max_tokens(fields, 0 if echo else 1, DEFAULT_COMPLETION_MAX_TOKENS)
    grammar = read_grammar(fields)
    request = GenerateRequest(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        n=read_n(fields, prompt),
        top_logprobs=fields.integer("logprobs", 0, MAX_LOGPROBS),
        grammar=grammar,
        echo=echo,
        suffix=fields.string("suffix") or None,
    )
    parsed = _apply_best_of(fields, _parse_common(fields, request, constrained=grammar is not None))
    fields.string("user")
    _reject_chat_fields(fields)
    reject_unsupported_fields(fields, "completions")
    fields.check_unknown()
    return parsed


def _reject_chat_fields(fields: Fields) -> None:
    """Rejects fields of chat completions that would change the output."""
    fields.reject("max_completion_tokens", instead="use max_tokens")
    fields.reject("tools", [], instead="use POST /v1/chat/completions")
    for name in ("messages", "reasoning_effort", "continue_final_message"):
        fields.reject(name, instead="use POST /v1/chat/completions")


def _read_max_tokens(fields: Fields, low: int, default: int | None = None) -> int | None:
    """Reads `max_tokens`, or llama.cpp's name for it. -1 means no limit but the context in the
    clients of llama.cpp and LM Studio."""
    limits = [
        None if value == -1 else fields.integer(name, low)
        for name in ("max_tokens", "n_predict")
        if (value := fields.value(name)) is not None
    ]
    return limits[0] if limits else default


def _parse_common(
    fields: Fields, request: GenerateRequest, *, constrained: bool
) -> ParsedCompletionRequest:
    """Parses the fields that both endpoints share."""
    stream = fields.boolean("stream") or False
    options = _stream_options(fields, stream)
    ids = fields.boolean("return_token_ids") or False
    stop_conditions = read_stop_conditions(
        fields, max_tokens=request.max_tokens, constrained=constrained
    )
    request = replace(
        stop_conditions.apply(request),
        sampling=read_sampling(fields),
        cache_prompt=fields.boolean("cache_prompt") is not False,
        num_keep=fields.integer("n_keep", -1, INT32_MAX),
        # continuous usage is computed from token IDs
        return_token_ids=ids or options.continuous_usage,
        keep_alive=read_keep_alive(fields),
    )
    return ParsedCompletionRequest(
        request=request,
        stream=stream,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        logprobs=request.top_logprobs is not None,
        return_token_ids=ids,
        num_prompts=count_prompts(request.prompt),
        n=request.n,
        return_progress=fields.boolean("return_progress") or False,
    )


def _apply_best_of(fields: Fields, parsed: ParsedCompletionRequest) -> ParsedCompletionRequest:
    """Applies `best_of`. The candidates are ranked by log probability, so all of them must be
    complete before any output is sent."""
    best_of = fields.integer("best_of", 1, MAX_BEST_OF)
    request = parsed.request
    if best_of is None or best_of == request.n:
        return parsed
    if best_of < request.n:
        raise invalid_request("best_of", f"best_of must be at least n, which is {request.n}")
    if parsed.stream:
        raise invalid_request("best_of", "best_of cannot be streamed: leave out best_of or stream")
    check_choice_limit("best_of", best_of, request.prompt)
    top = 0 if request.top_logprobs is None else request.top_logprobs
    return replace(parsed, request=replace(request, n=best_of, top_logprobs=top))


class _StreamOptions(NamedTuple):
    include_usage: bool = False
    continuous_usage: bool = False


def _stream_options(fields: Fields, stream: bool) -> _StreamOptions:
    """Reads OpenAI's stream options, and `continuous_usage_stats` from vLLM and SGLang."""
    options = fields.nested("stream_options")
    if options is None:
        return _StreamOptions()
    if not stream:
        raise invalid_request("stream_options", "stream_options is only allowed with stream: true")
    options.reject("include_obfuscation", False)
    read = _StreamOptions(
        include_usage=options.boolean("include_usage") or False,
        continuous_usage=options.boolean("continuous_usage_stats") or False,
    )
    options.check_unknown()
    return read


def _chat_logprobs(fields: Fields) -> int | None:
    enabled = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if enabled:
        return top or 0
    if top is not None:
        raise invalid_request("top_logprobs", "top_logprobs is only allowed with logprobs: true")
    return None


def _check_store(fields: Fields) -> None:
    if fields.boolean("store"):
        raise invalid_request(
            "store",
            "store: true is not supported: chat completions are not stored. Leave it out, or use "
            "POST /v1/responses, which stores responses",
        )


def _reject_unsupported(fields: Fields) -> None:
    """Rejects fields that OpenAI documents for chat completions but that this server does not
    support."""
    # These values match the behavior of this server.
    fields.reject("modalities", ["text"])
    fields.reject("functions", instead="use tools")
    fields.reject("function_call", instead="use tool_choice")
    fields.reject("prompt", instead="use messages")
    fields.reject("max_output_tokens", instead="use max_completion_tokens")
    fields.reject("suffix", "")
    fields.reject("web_search_options", instead="define a search function in tools")
    fields.nested("prediction")  # would not speed up generation, and never changes the output
    for unsupported in ("audio", "moderation"):
        fields.reject(unsupported)


def check_model(fields: Fields) -> None:
    """Checks the type of the field. The model was resolved earlier."""
    fields.string("model")


def read_keep_alive(fields: Fields) -> float | None:
    """Returns the number of seconds that the model stays loaded after this request; math.inf means
    forever. The field comes from Ollama. It is a number of seconds, or a duration such as "90s",
    "5m" or "1h30m". A negative value means forever, and so does one beyond Ollama's longest
    duration. LM Studio calls this field `ttl`."""
    seconds, ttl = _read_seconds(fields, "keep_alive"), _read_seconds(fields, "ttl")
    if seconds is not None and ttl is not None and seconds != ttl:
        raise invalid_request("ttl", "keep_alive and ttl are aliases: keep one of them")
    return ttl if seconds is None else seconds


def _read_seconds(fields: Fields, name: str) -> float | None:
    value = fields.value(name)
    if isinstance(value, str):
        seconds = units.parse_duration(value)
    else:
        seconds = fields.number(name, -(2.0**63), 2.0**63)
        if value is None:
            return None
    if seconds is None:
        expected = 'a number of seconds or a duration such as "5m"'
        raise invalid_request(name, f"{name} must be {expected}, not {quote_value(value)}")
    return seconds if 0 <= seconds <= units.LONGEST_DURATION else math.inf


def read_service_tier(fields: Fields) -> str | None:
    """Returns the tier to include in the response. As in OpenAI's API, it is included only if the
    request specifies one."""
    fields.reject("service_tier", "auto", SERVICE_TIER)
    return None if fields.value("service_tier") is None else SERVICE_TIER


def check_identifiers(fields: Fields) -> None:
    """Checks the fields that identify a user or configure OpenAI's prefix cache. They are not used,
    because the prefix cache is indexed by tokens and caches everything."""
    for identifier in IDENTIFIER_FIELDS:
        fields.string(identifier)
    fields.string("prompt_cache_retention")
    fields.nested("prompt_cache_options")
    fields.nested("client_metadata")  # sent by Codex with every request


def check_metadata(fields: Fields) -> None:
    """Checks `metadata` against OpenAI's limits. Metadata annotates stored responses and does not
    affect the output."""
    metadata = fields.nested("metadata")
    if metadata is None:
        return
    pairs = list(metadata.items())
    if len(pairs) > 16:
        raise invalid_request(
            "metadata", f"metadata must contain at most 16 pairs, not {len(pairs)}"
        )
    for key, value in pairs:
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise invalid_request(
                metadata.path(key[:64]),
                "metadata maps keys of up to 64 characters to strings of up to 512 characters",
            )
