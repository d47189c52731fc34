"""OpenAI's Python library: text completions, which continue a prompt.

OPENAI_BASE_URL=http://localhost:8080/v1 python examples/openai_completions.py
"""

import math
import os

from openai import OpenAI

os.environ.setdefault("OPENAI_BASE_URL", "http://localhost:8080/v1")
os.environ.setdefault("OPENAI_API_KEY", "any")  # required by the library, not by the server

PROMPT = "Once upon a time"


def main() -> None:
    client = OpenAI()
    model = client.models.list().data[0].id
    greedy = {"model": model, "temperature": 0, "max_tokens": 24}

    # With `echo`, the prompt is returned before the completion.
    plain = client.completions.create(**greedy, prompt=PROMPT).choices[0]
    echoed = client.completions.create(**greedy, prompt=PROMPT, echo=True).choices[0]
    print("text:", echoed.text)
    assert echoed.text == PROMPT + plain.text

    # The stream has the same text.
    stream = client.completions.create(**greedy, prompt=PROMPT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.text

    # Several prompts in one request are completed concurrently. Each has its own index.
    prompts = [PROMPT, "Hello! ", "The sun"]
    answers = client.completions.create(**greedy, prompt=prompts).choices
    for prompt, choice in zip(prompts, answers, strict=True):
        print(f"{choice.index}: {prompt}|{choice.text}")
    assert answers[0].text == plain.text

    # A stop string ends the completion and is not part of it.
    cut = next(word for word in plain.text.split() if word)
    stopped = client.completions.create(**greedy, prompt=PROMPT, stop=[cut]).choices[0]
    assert stopped.finish_reason == "stop"
    assert cut not in stopped.text

    # The likelihood of a text: request no new tokens, and the log-probabilities of the prompt.
    scored = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0
    ).choices[0]
    assert scored.logprobs
    first, *known = scored.logprobs.token_logprobs or []
    assert first is None  # the first token has no prediction
    print(f"perplexity of {scored.text!r}: {math.exp(-sum(known) / len(known)):.1f}")


if __name__ == "__main__":
    main()
