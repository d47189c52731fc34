"""A client that `tools.builtin_model.evaluate` uses to evaluate the built-in model over HTTP.

`make bench ARGS=builtin` runs it on the held-out questions.
"""

from collections.abc import Callable

import httpx

PATIENCE_SECONDS = 120.0


def make_chat_client(base: str) -> Callable[[str], str]:
    """A function that sends a question to POST /v1/chat/completions of the server at `base`, with
    all defaults of the server, and returns the answer."""

    def answer(question: str) -> str:
        body = {"model": "builtin", "messages": [{"role": "user", "content": question}]}
        reply = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"])

    return answer
