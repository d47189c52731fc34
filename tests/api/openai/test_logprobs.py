"""Log-probabilities in the formats of chat completions and completions."""

from app.api.openai.logprobs import CompletionLogprobs, render_chat_logprobs
from app.core.events import TokenLogprob, TopLogprob


def token(raw: bytes, logprob: float | None = -0.5, *top: TopLogprob) -> TokenLogprob:
    return TokenLogprob(
        text=raw.decode(errors="replace"), token_bytes=raw, logprob=logprob, top_logprobs=top
    )


def candidate(raw: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(text=raw.decode(errors="replace"), token_bytes=raw, logprob=logprob)


def test_top_logprobs_are_listed_with_the_token():
    assert render_chat_logprobs(
        [token(b"a", -0.5, candidate(b"a", -0.5), candidate(b"\xe4", -2.0))]
    ) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "�", "logprob": -2.0, "bytes": [0xE4]},
                ],
            }
        ],
        "refusal": None,
    }


def test_an_infinite_logprob_is_written_as_a_number():
    (entry,) = render_chat_logprobs([token(b"a", float("-inf"))])["content"]
    assert entry["logprob"] == -9999.0
    assert CompletionLogprobs().render([token(b"a", float("-inf"))])["token_logprobs"] == [-9999.0]


def test_completions_have_four_lists():
    columns = CompletionLogprobs()
    first = columns.render(
        [
            token(b"one", -0.1, candidate(b"one", -0.1), candidate(b"two", -2.0)),
            token(b"\xe4", -0.2, candidate(b"\xe5", -0.3)),
        ]
    )
    assert first == {
        "tokens": ["one", "bytes:\\xe4"],
        "token_logprobs": [-0.1, -0.2],
        "top_logprobs": [{"one": -0.1, "two": -2.0}, {"bytes:\\xe5": -0.3, "bytes:\\xe4": -0.2}],
        "text_offset": [0, 3],
    }
    # the next chunk continues in the middle of a character
    assert columns.render([token(b"\xbd\xa0", -0.4), token(b"!", -0.5)]) == {
        "tokens": ["bytes:\\xbd\\xa0", "!"],
        "token_logprobs": [-0.4, -0.5],
        "top_logprobs": [{"bytes:\\xbd\\xa0": -0.4}, {"!": -0.5}],
        "text_offset": [3, 4],
    }


def test_the_sampled_token_is_always_among_the_top_logprobs():
    (top_logprobs,) = CompletionLogprobs().render(
        [token(b"c", -7.0, candidate(b"a", -0.1), candidate(b"b", -0.2))]
    )["top_logprobs"]
    assert top_logprobs == {"a": -0.1, "b": -0.2, "c": -7.0}


def test_the_first_token_of_an_echoed_prompt_has_no_logprob():
    columns = CompletionLogprobs().render([token(b"Once", None), token(b" upon", -0.25)])
    assert columns["token_logprobs"] == [None, -0.25]
    assert columns["top_logprobs"] == [None, {" upon": -0.25}]
