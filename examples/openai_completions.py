"""OpenAI's Python library: plain completions, which go on where a text stops.

OPENAI_BASE_URL=http://localhost:8080/v1 python examples/openai_completions.py
"""

import math
import os

from openai import OpenAI

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # the library wants one, the server does not

PROMPT = "Once upon a time"


def main() -> None:
    client = OpenAI()
    model = client.models.list().data[0].id
    greedy = {"model": model, "temperature": 0, "max_tokens": 24}

    # Echo gives the prompt back in front of what follows.
    plain = client.completions.create(**greedy, prompt=PROMPT).choices[0]
    echoed = client.completions.create(**greedy, prompt=PROMPT, echo=True).choices[0]
    print("text:", echoed.text)
    assert echoed.text == PROMPT + plain.text

    # Streamed, it is the same text.
    stream = client.completions.create(**greedy, prompt=PROMPT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.text

    # Several prompts in one request are answered beside each other, each with its own number.
    prompts = [PROMPT, "Hello! ", "The sun"]
    answers = client.completions.create(**greedy, prompt=prompts).choices
    for prompt, choice in zip(prompts, answers, strict=True):
        print(f"{choice.index}: {prompt}|{choice.text}")
    assert answers[0].text == plain.text

    # A stop string ends an answer, and is not part of it.
    cut = next(word for word in plain.text.split() if word)
    stopped = client.completions.create(**greedy, prompt=PROMPT, stop=[cut]).choices[0]
    assert stopped.finish_reason == "stop"
    assert cut not in stopped.text

    # How surprising is a text? Ask for nothing new, and for the prompt's own probabilities.
    scored = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0
    ).choices[0]
    assert scored.logprobs
    first, *known = scored.logprobs.token_logprobs or []
    assert first is None  # nothing stands before it
    print(f"perplexity of {scored.text!r}: {math.exp(-sum(known) / len(known)):.1f}")


if __name__ == "__main__":
    main()
