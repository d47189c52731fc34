"""Log-probabilities, as chat completions and as completions write them.

Knows both forms. A token that is no text by itself (half a character) is told by its bytes in both.
Must not know: how tokens come to be text.
"""

import codecs
from collections.abc import Iterable

from app.api.wire import JsonObject, long_array
from app.core.events import TokenLogprob, TopLogprob

# What OpenAI writes for "next to impossible"; JSON has no infinities.
LEAST_LOGPROB = -9999.0


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> JsonObject:
    return {"content": long_array(entries(tokens)), "refusal": None}


def entries(tokens: Iterable[TokenLogprob]) -> list[JsonObject]:
    """One per token, its rivals within."""
    return [
        _entry(token) | {"top_logprobs": [_entry(rival) for rival in token.top]} for token in tokens
    ]


class Columns:
    """The four parallel lists of completions. Offsets count the characters of the completion
    before each token; a token amid a character stands where that character begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, tokens: Iterable[TokenLogprob]) -> JsonObject:
        """The lists for the next tokens of the answer."""
        names: list[str] = []
        logprobs: list[float | None] = []
        rivals: list[dict[str, float | None] | None] = []
        offsets: list[int] = []
        for token in tokens:
            names.append(_name(token))
            logprobs.append(_logprob(token))
            rivals.append(_rivals(token))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.raw))
        return {
            "tokens": long_array(names),
            "token_logprobs": long_array(logprobs),
            "top_logprobs": long_array(rivals),
            "text_offset": long_array(offsets),
        }


def _logprob(token: TokenLogprob | TopLogprob) -> float | None:
    return None if token.logprob is None else max(token.logprob, LEAST_LOGPROB)


def _entry(token: TokenLogprob | TopLogprob) -> JsonObject:
    return {"token": token.text, "logprob": _logprob(token), "bytes": list(token.raw)}


def _rivals(token: TokenLogprob) -> dict[str, float | None] | None:
    """The sampled token always stands among them, so there may be one more than asked for. The
    first token of an echoed prompt has none: it was not foretold by anything."""
    if token.logprob is None:
        return None
    rivals = {_name(rival): _logprob(rival) for rival in token.top}
    return rivals | {_name(token): _logprob(token)}


def _name(token: TokenLogprob | TopLogprob) -> str:
    """A token's text, or its bytes spelled as OpenAI does where they are no text: keys of a map
    must differ, and every half character would read U+FFFD."""
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
