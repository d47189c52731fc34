"""Clients that send requests, and the outcome of each."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from tests.chaos.questions import ChaosQuestion

# seconds after which a request counts as hung
TIMEOUT = 120.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one request. text: of a complete answer. status, code, message: of an error.
    disconnected: by the client. failure: a clause, if there is neither an answer nor an error
    response."""

    question: ChaosQuestion
    streamed: bool
    seconds: float = 0.0
    text: str | None = None
    status: int = 200
    code: str | None = None
    message: str | None = None
    disconnected: bool = False
    failure: str | None = None


class LoadGenerator:
    """clients: run concurrently, each with one request after the other."""

    def __init__(
        self, url: str, questions: Sequence[ChaosQuestion], *, clients: int, seed: int
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._url = url
        self._questions = questions
        self._clients = clients
        self._seed = seed

    async def run(self, seconds: float) -> None:
        """Returns when all requests started within `seconds` have ended."""
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for client in range(self._clients):
                group.create_task(self._send_until(deadline, random.Random(self._seed + client)))

    async def _send_until(self, deadline: float, rng: random.Random) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT) as http:
            while time.monotonic() < deadline:
                question = rng.choice(self._questions)
                disconnect_after = rng.uniform(0, 2) if rng.random() < 0.15 else None
                start = time.monotonic()
                outcome = await send_question(
                    http, question, streamed=rng.random() < 0.5, disconnect_after=disconnect_after
                )
                self.outcomes.append(
                    Outcome(**{**vars(outcome), "seconds": time.monotonic() - start})
                )
                if outcome.code is not None:
                    await asyncio.sleep(0.1)


async def send_question(
    http: httpx.AsyncClient,
    question: ChaosQuestion,
    *,
    streamed: bool,
    disconnect_after: float | None = None,
) -> Outcome:
    """disconnect_after: seconds after which the client disconnects."""
    request = _send_streamed(http, question) if streamed else _send_unstreamed(http, question)
    try:
        async with asyncio.timeout(TIMEOUT if disconnect_after is None else disconnect_after):
            return await request
    except TimeoutError:
        if disconnect_after is not None:
            return Outcome(question=question, streamed=streamed, disconnected=True)
        return _failure_outcome(question, streamed, f"did not finish within {TIMEOUT:.0f} s")
    except httpx.TransportError as error:
        return _failure_outcome(question, streamed, f"{type(error).__name__}: {error}")


async def _send_unstreamed(http: httpx.AsyncClient, question: ChaosQuestion) -> Outcome:
    reply = await http.post("/v1/completions", json=question.body())
    if reply.status_code != 200:
        return _error_from_reply(question, False, reply)
    [choice] = reply.json()["choices"]
    return Outcome(question=question, streamed=False, text=choice["text"])


async def _send_streamed(http: httpx.AsyncClient, question: ChaosQuestion) -> Outcome:
    body = {**question.body(), "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            await reply.aread()
            return _error_from_reply(question, True, reply)
        text, reason = "", None
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                if reason is None:
                    return _failure_outcome(question, True, "a stream without finish_reason")
                return Outcome(question=question, streamed=True, text=text)
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return _error_outcome(question, True, reply.status_code, chunk)
            for choice in chunk["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return _failure_outcome(question, True, "a stream that ended without [DONE]")


def _error_from_reply(question: ChaosQuestion, streamed: bool, reply: httpx.Response) -> Outcome:
    try:
        return _error_outcome(question, streamed, reply.status_code, reply.json())
    except (ValueError, KeyError):
        return _failure_outcome(
            question, streamed, f"{reply.status_code} with {reply.content[:200]!r}"
        )


def _error_outcome(
    question: ChaosQuestion, streamed: bool, status: int, body: dict[str, dict]
) -> Outcome:
    error = body["error"]
    return Outcome(
        question=question,
        streamed=streamed,
        status=status,
        code=str(error["code"]),
        message=error["message"],
    )


def _failure_outcome(question: ChaosQuestion, streamed: bool, failure: str) -> Outcome:
    return Outcome(question=question, streamed=streamed, failure=failure)
