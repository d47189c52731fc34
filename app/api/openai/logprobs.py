"""Log probabilities in the formats of chat completions and completions.

Knows: both formats, and vLLM's for prompts. Must not know: the detokenizer.

In OpenAI's formats, a token that is not valid UTF-8 (part of a character) is represented by its
bytes.
"""

import codecs
from collections.abc import Iterable, Sequence

from app.core.events import TokenLogprob, TopLogprob
from app.http.responses import JsonObject, encode_long_array

# OpenAI's value for a token with probability near zero; JSON cannot represent infinity.
MIN_LOGPROB = -9999.0


def render_chat_logprobs(tokens: Iterable[TokenLogprob]) -> JsonObject:
    return {"content": encode_long_array(render_token_logprobs(tokens)), "refusal": None}


def render_token_logprobs(tokens: Iterable[TokenLogprob]) -> list[JsonObject]:
    """Renders one object per token, including its alternatives."""
    return [
        _entry(token)
        | {"top_logprobs": [_entry(alternative) for alternative in token.top_logprobs]}
        for token in tokens
    ]


def render_prompt_logprobs(tokens: Sequence[TokenLogprob] | None) -> JsonObject:
    """Returns vLLM's `prompt_logprobs`: for each token of the prompt an object of token IDs, and
    null for the first, which was not predicted. The rank of a token is known only if it is among
    the alternatives. None, for a request without them, returns no field."""
    if tokens is None:
        return {}
    entries = [None if token.logprob is None else _rank(token) for token in tokens]
    return {"prompt_logprobs": encode_long_array(entries)}


def _rank(token: TokenLogprob) -> JsonObject:
    ranks = {other.token_id: rank for rank, other in enumerate(token.top_logprobs, start=1)}
    return {
        str(one.token_id): {
            "logprob": _logprob(one),
            "rank": ranks.get(one.token_id),
            "decoded_token": one.text,
        }
        for one in (token, *token.top_logprobs)
    }


class CompletionLogprobs:
    """The four parallel lists of the completions format. An offset is the number of characters
    before a token. A token that starts inside a character has the offset of that character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def render(self, tokens: Iterable[TokenLogprob]) -> JsonObject:
        """Returns the lists for the next tokens of the response."""
        names: list[str] = []
        logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float | None] | None] = []
        offsets: list[int] = []
        for token in tokens:
            names.append(_token_key(token))
            logprobs.append(_logprob(token))
            top_logprobs.append(_top_logprobs(token))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.token_bytes))
        return {
            "tokens": encode_long_array(names),
            "token_logprobs": encode_long_array(logprobs),
            "top_logprobs": encode_long_array(top_logprobs),
            "text_offset": encode_long_array(offsets),
        }


def _logprob(token: TokenLogprob | TopLogprob) -> float | None:
    return None if token.logprob is None else max(token.logprob, MIN_LOGPROB)


def _entry(token: TokenLogprob | TopLogprob) -> JsonObject:
    return {"token": token.text, "logprob": _logprob(token), "bytes": list(token.token_bytes)}


def _top_logprobs(token: TokenLogprob) -> dict[str, float | None] | None:
    """Returns the alternatives of a token. The sampled token is always included, so there may be
    one more alternative than requested. For the first token of an echoed prompt, returns None,
    because this token was not predicted."""
    if token.logprob is None:
        return None
    alternatives = {
        _token_key(alternative): _logprob(alternative) for alternative in token.top_logprobs
    }
    return alternatives | {_token_key(token): _logprob(token)}


def _token_key(token: TokenLogprob | TopLogprob) -> str:
    """Returns the token's text, or OpenAI's notation for its bytes if the token is not valid UTF-8.
    Decoding to U+FFFD would not give distinct keys."""
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)
