"""OpenAI's requests: converts their structs to a generate request.

Knows: chat completions and completions, the prompts of completions (a string, token IDs, or several
of either). Must not know: response formats, the model's vocabulary, the context length. The serving
layer checks the vocabulary and the context length.

The other modules in this folder convert the shared fields.
"""

import math
from dataclasses import dataclass, replace

from msgspec import Raw

from app.api.fields import as_array, as_token_ids, invalid_request, quote_value
from app.api.openai.chat import build_conversation, build_tool_options
from app.api.openai.sampling import (
    build_sampling,
    build_stop_conditions,
    build_template_options,
    build_thinking,
    build_verbosity,
)
from app.api.openai.structured_outputs import build_grammar
from app.api.schema.decode import decode_json, decode_object
from app.api.schema.generation import MAX_CHOICES, StreamOptions
from app.api.schema.openai import (
    CHAT,
    COMPLETION,
    MAX_METADATA_KEY,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE,
    SERVICE_TIER,
    ChatBody,
    CompletionBody,
)
from app.core import units
from app.core.requests import Conversation, GenerateRequest, Prompt, PromptBatch
from app.core.sampling_params import USUAL_LOGPROBS_LIMIT, LogprobsLimit
from app.core.units import pluralize

DEFAULT_COMPLETION_MAX_TOKENS = 16  # OpenAI's default, for completions only


def build_prompt(value: Raw) -> Prompt:
    """Returns the prompt of a completion."""
    prompt = decode_json(value)
    if prompt is None:
        raise invalid_request("prompt", "prompt is missing")
    if isinstance(prompt, str):
        return prompt
    items = as_array(prompt)
    if not items:
        expected = "a string, an array of token IDs, or an array of these"
        raise invalid_request("prompt", f"prompt must be {expected}, not {quote_value(prompt)}")
    if not isinstance(items[0], str | list):
        return as_token_ids(items, "prompt")
    if len(items) > MAX_CHOICES:
        raise invalid_request(
            "prompt", f"prompt must contain at most {MAX_CHOICES} prompts, not {len(items)}"
        )
    prompts = tuple(_build_prompt_item(item, f"prompt.{index}") for index, item in enumerate(items))
    return prompts[0] if len(prompts) == 1 else PromptBatch(prompts=prompts)


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


def _build_prompt_item(item: object, path: str) -> str | tuple[int, ...]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletionRequest:
    """A valid request.

    num_prompts: the number of prompts. n: the number of choices returned per prompt. request.n is
    the number of choices generated; the most likely ones are returned. logprobs, return_token_ids:
    whether to include them in the response. include_usage: whether to end the stream with a chunk
    of token counts. continuous_usage: whether to add the token counts so far to every chunk with a
    choice. return_progress: whether chunks report the progress of the prefill. tier: the service
    tier to return; None omits it. verbose: whether the response contains the text of the prompt;
    None uses the server's default.
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
    verbose: bool | None = None


def parse_chat(
    data: bytes | bytearray, model: str, limit: LogprobsLimit = USUAL_LOGPROBS_LIMIT
) -> ParsedCompletionRequest:
    """Parses the body of POST /v1/chat/completions. Raises AppError(INVALID) for an invalid
    request."""
    return build_chat(CHAT.decode(data), model, limit)


def build_chat(
    body: ChatBody, model: str, limit: LogprobsLimit = USUAL_LOGPROBS_LIMIT
) -> ParsedCompletionRequest:
    conversation = _continue_final(body, build_conversation(body.messages))
    older = _get_max_tokens(body, 1)
    newer = body.max_completion_tokens
    tool_options = build_tool_options(body)
    grammar = build_grammar(body)
    thinking = build_thinking(body)
    request = GenerateRequest(
        model=model,
        prompt=conversation,
        max_tokens=newer if newer is not None else older,
        n=check_choice_limit("n", body.n or 1, conversation),
        top_logprobs=_get_chat_logprobs(body, limit),
        tools=tool_options.tools,
        tool_choice=tool_options.choice,
        parallel_tool_calls=tool_options.parallel,
        # A required tool call leaves no text to constrain.
        grammar=None if tool_options.must_call else grammar,
        reasoning=thinking,
        verbosity=build_verbosity(verbosity=body.verbosity, text_verbosity=body.text_verbosity),
        chat_template_kwargs=build_template_options(body.chat_template_kwargs, thinking),
    )
    # a reasoning budget is also enforced with a grammar
    limited = thinking.token_budget is not None
    constrained = grammar is not None or tool_options.constrained or limited
    parsed = _build_common(body, request, limit, constrained=constrained)
    check_metadata(body.metadata)
    if body.store:
        raise invalid_request(
            "store",
            "store: true is not supported: chat completions are not stored. Leave it out, or use "
            "POST /v1/responses, which stores responses",
        )
    # as in OpenAI's API, the response has a tier only if the request specifies one
    tier = None if body.service_tier is None else SERVICE_TIER
    return replace(parsed, tier=tier, verbose=body.verbose)


def _continue_final(body: ChatBody, conversation: Conversation) -> Conversation:
    """Applies `continue_final_message` and `add_generation_prompt`, which starts a new message. The
    rules are the same as in vLLM."""
    begins = body.add_generation_prompt
    if not body.continue_final_message:
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


def parse_completion(
    data: bytes | bytearray, model: str, limit: LogprobsLimit = USUAL_LOGPROBS_LIMIT
) -> ParsedCompletionRequest:
    """Parses the body of POST /v1/completions. Raises AppError(INVALID) for an invalid request."""
    body = COMPLETION.decode(data)
    prompt = build_prompt(body.prompt)
    echo = body.echo or False
    # zero tokens are useful with echo, which returns the prompt
    max_tokens = _get_max_tokens(body, 0 if echo else 1, DEFAULT_COMPLETION_MAX_TOKENS)
    grammar = build_grammar(body)
    request = GenerateRequest(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        n=check_choice_limit("n", body.n or 1, prompt),
        top_logprobs=limit.resolve("logprobs", body.logprobs),
        grammar=grammar,
        echo=echo,
        suffix=body.suffix or None,
    )
    parsed = _build_common(body, request, limit, constrained=grammar is not None)
    return _apply_best_of(body.best_of, parsed)


def _get_max_tokens(
    body: ChatBody | CompletionBody, low: int, default: int | None = None
) -> int | None:
    """Returns `max_tokens`, or llama.cpp's name for it. In clients of llama.cpp and LM Studio, -1
    means no limit except the context."""
    limits = {"max_tokens": body.max_tokens, "n_predict": body.n_predict}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    for name, limit in given.items():
        if 0 <= limit < low:
            raise invalid_request(name, f"{name} must be an integer of at least {low}, not {limit}")
    limit = next(iter(given.values()), default)
    return None if limit == -1 else limit


def _build_common(
    body: ChatBody | CompletionBody,
    request: GenerateRequest,
    limit: LogprobsLimit,
    *,
    constrained: bool,
) -> ParsedCompletionRequest:
    """Applies the fields that both endpoints share."""
    stream = body.stream or False
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not stream:
        raise invalid_request("stream_options", "stream_options is only allowed with stream: true")
    scores = limit.resolve("prompt_logprobs", body.prompt_logprobs)
    if scores is not None and stream:
        raise invalid_request(
            "prompt_logprobs", "prompt_logprobs cannot be streamed: remove one of them"
        )
    ids = body.return_token_ids or False
    continuous_usage = options.continuous_usage_stats or False
    stop_conditions = build_stop_conditions(
        body, max_tokens=request.max_tokens, constrained=constrained
    )
    request = replace(
        request,
        **stop_conditions,
        sampling=build_sampling(body),
        cache_prompt=body.cache_prompt is not False,
        num_keep=body.n_keep,
        prompt_logprobs=scores,
        # continuous usage is computed from token IDs
        return_token_ids=ids or continuous_usage,
        keep_alive=get_keep_alive(body.keep_alive, body.ttl),
    )
    return ParsedCompletionRequest(
        request=request,
        stream=stream,
        include_usage=options.include_usage or False,
        continuous_usage=continuous_usage,
        logprobs=request.top_logprobs is not None,
        return_token_ids=ids,
        num_prompts=count_prompts(request.prompt),
        n=request.n,
        return_progress=body.return_progress or False,
    )


def _apply_best_of(best_of: int | None, parsed: ParsedCompletionRequest) -> ParsedCompletionRequest:
    """Applies `best_of`. The candidates are ranked by log probability, so all of them must be
    complete before any output is sent."""
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


def _get_chat_logprobs(body: ChatBody, limit: LogprobsLimit) -> int | None:
    top = limit.resolve("top_logprobs", body.top_logprobs)
    if body.logprobs:
        return top or 0
    if body.top_logprobs is not None:
        raise invalid_request("top_logprobs", "top_logprobs is only allowed with logprobs: true")
    return None


def get_keep_alive(keep_alive: float | str | None, ttl: float | str | None = None) -> float | None:
    """Returns the number of seconds that the model stays loaded after this request; math.inf means
    forever. The field comes from Ollama. It is a number of seconds, or a duration such as "90s",
    "5m" or "1h30m". A negative value means forever, and so does one beyond Ollama's longest
    duration. LM Studio calls this field `ttl`."""
    seconds, alias = _parse_seconds(keep_alive, "keep_alive"), _parse_seconds(ttl, "ttl")
    if seconds is not None and alias is not None and seconds != alias:
        raise invalid_request("ttl", "keep_alive and ttl are aliases: keep one of them")
    return alias if seconds is None else seconds


def _parse_seconds(value: float | str | None, name: str) -> float | None:
    if value is None:
        return None
    seconds = units.parse_duration(value) if isinstance(value, str) else value
    if seconds is None:
        expected = 'a number of seconds or a duration such as "5m"'
        raise invalid_request(name, f"{name} must be {expected}, not {quote_value(value)}")
    return seconds if 0 <= seconds <= units.LONGEST_DURATION else math.inf


def check_metadata(value: Raw) -> None:
    """Checks `metadata` against OpenAI's limits. Metadata annotates stored responses and does not
    affect the output."""
    metadata = decode_object(value, "metadata") or {}
    pairs = [(key, text) for key, text in metadata.items() if text is not None]
    if len(pairs) > MAX_METADATA_PAIRS:
        raise invalid_request(
            "metadata",
            f"metadata must contain at most {MAX_METADATA_PAIRS} pairs, not {len(pairs)}",
        )
    for key, text in pairs:
        is_valid = isinstance(text, str) and len(text) <= MAX_METADATA_VALUE
        if len(key) > MAX_METADATA_KEY or not is_valid:
            raise invalid_request(
                f"metadata.{key[:MAX_METADATA_KEY]}",
                f"metadata maps keys of up to {MAX_METADATA_KEY} characters to strings of up to "
                f"{MAX_METADATA_VALUE} characters",
            )
