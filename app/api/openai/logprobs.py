"""Log-probabilities, as chat completions and as completions write them.

Knows both forms. A token that is no text by itself (half a character) is told by its bytes in both.
Must not know: how tokens come to be text.
"""

import codecs
from collections.abc import Iterable

from app.core.events import TokenLogprob, TopLogprob
from app.http.responses import JsonObject, encode_long_array

# What OpenAI writes for "next to impossible"; JSON has no infinities.
MIN_LOGPROB = -9999.0


def render_chat_logprobs(tokens: Iterable[TokenLogprob]) -> JsonObject:
    return {"content": encode_long_array(render_token_logprobs(tokens)), "refusal": None}


def render_token_logprobs(tokens: Iterable[TokenLogprob]) -> list[JsonObject]:
    """One per token, its rivals within."""
    return [
        _entry(token) | {"top_logprobs": [_entry(rival) for rival in token.top_logprobs]}
        for token in tokens
    ]


class CompletionLogprobs:
    """The four parallel lists of completions. Offsets count the characters of the completion
    before each token; a token amid a character stands where that character begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def render(self, tokens: Iterable[TokenLogprob]) -> JsonObject:
        """The lists for the next tokens of the answer."""
        names: list[str] = []
        logprobs: list[float | None] = []
        rivals: list[dict[str, float | None] | None] = []
        offsets: list[int] = []
        for token in tokens:
            names.append(_token_key(token))
            logprobs.append(_logprob(token))
            rivals.append(_top_logprobs(token))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.token_bytes))
        return {
            "tokens": encode_long_array(names),
            "token_logprobs": encode_long_array(logprobs),
            "top_logprobs": encode_long_array(rivals),
            "text_offset": encode_long_array(offsets),
        }


def _logprob(token: TokenLogprob | TopLogprob) -> float | None:
    return None if token.logprob is None else max(token.logprob, MIN_LOGPROB)


def _entry(token: TokenLogprob | TopLogprob) -> JsonObject:
    return {"token": token.text, "logprob": _logprob(token), "bytes": list(token.token_bytes)}


def _top_logprobs(token: TokenLogprob) -> dict[str, float | None] | None:
    """The sampled token always stands among them, so there may be one more than asked for. The
    first token of an echoed prompt has none: it was not foretold by anything."""
    if token.logprob is None:
        return None
    rivals = {_token_key(rival): _logprob(rival) for rival in token.top_logprobs}
    return rivals | {_token_key(token): _logprob(token)}


def _token_key(token: TokenLogprob | TopLogprob) -> str:
    """A token's text, or its bytes spelled as OpenAI does where they are no text: keys of a map
    must differ, and every half character would read U+FFFD."""
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)
