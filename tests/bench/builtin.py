"""The built-in model over HTTP: what `models.builtin.training.evaluate` needs to judge it as a
client sees it.

`make bench ARGS=builtin` asks it the held-back questions.
"""

from collections.abc import Callable

import httpx

PATIENCE_SECONDS = 120.0


def make_chat_client(base: str) -> Callable[[str], str]:
    """A function from a question to what POST /v1/chat/completions of the server at `base` says,
    with the server's own defaults for everything."""

    def answer(question: str) -> str:
        body = {"model": "builtin", "messages": [{"role": "user", "content": question}]}
        reply = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"])

    return answer
