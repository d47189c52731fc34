"""Clients that ask, and what became of each request."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from tests.chaos.questions import Question

# seconds after which a request that has not ended counts as one that never does
ENDLESS = 120.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one request came to. text: of an answer that is whole. status, code, message: of an
    error. left: the client hung up. broken: a clause, for what is neither an answer nor an error
    that we were told."""

    question: Question
    streamed: bool
    seconds: float = 0.0
    text: str | None = None
    status: int = 200
    code: str | None = None
    message: str | None = None
    left: bool = False
    broken: str | None = None


class Load:
    """clients: beside each other, each of which asks one thing after the other."""

    def __init__(self, url: str, asked: Sequence[Question], *, clients: int, seed: int) -> None:
        self.outcomes: list[Outcome] = []
        self._url = url
        self._asked = asked
        self._clients = clients
        self._seed = seed

    async def run(self, seconds: float) -> None:
        """Returns when all requests that were begun within `seconds` have ended."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for client in range(self._clients):
                group.create_task(self._ask_until(until, random.Random(self._seed + client)))

    async def _ask_until(self, until: float, rng: random.Random) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=ENDLESS) as http:
            while time.monotonic() < until:
                question = rng.choice(self._asked)
                patience = rng.uniform(0, 2) if rng.random() < 0.15 else None
                began = time.monotonic()
                outcome = await ask(http, question, streamed=rng.random() < 0.5, patience=patience)
                self.outcomes.append(
                    Outcome(**{**vars(outcome), "seconds": time.monotonic() - began})
                )
                if outcome.code is not None:
                    await asyncio.sleep(0.1)


async def ask(
    http: httpx.AsyncClient, question: Question, *, streamed: bool, patience: float | None = None
) -> Outcome:
    """patience: seconds after which the client hangs up."""
    asking = _stream(http, question) if streamed else _whole(http, question)
    try:
        async with asyncio.timeout(ENDLESS if patience is None else patience):
            return await asking
    except TimeoutError:
        if patience is not None:
            return Outcome(question=question, streamed=streamed, left=True)
        return _broken(question, streamed, f"did not finish within {ENDLESS:.0f} s")
    except httpx.TransportError as error:
        return _broken(question, streamed, f"{type(error).__name__}: {error}")


async def _whole(http: httpx.AsyncClient, question: Question) -> Outcome:
    reply = await http.post("/v1/completions", json=question.body())
    if reply.status_code != 200:
        return _refused(question, False, reply)
    [choice] = reply.json()["choices"]
    return Outcome(question=question, streamed=False, text=choice["text"])


async def _stream(http: httpx.AsyncClient, question: Question) -> Outcome:
    body = {**question.body(), "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            await reply.aread()
            return _refused(question, True, reply)
        text, reason = "", None
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                if reason is None:
                    return _broken(question, True, "a stream without finish_reason")
                return Outcome(question=question, streamed=True, text=text)
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return _error(question, True, reply.status_code, chunk)
            for choice in chunk["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return _broken(question, True, "a stream that ended without [DONE]")


def _refused(question: Question, streamed: bool, reply: httpx.Response) -> Outcome:
    try:
        return _error(question, streamed, reply.status_code, reply.json())
    except (ValueError, KeyError):
        return _broken(question, streamed, f"{reply.status_code} with {reply.content[:200]!r}")


def _error(question: Question, streamed: bool, status: int, told: dict[str, dict]) -> Outcome:
    error = told["error"]
    return Outcome(
        question=question,
        streamed=streamed,
        status=status,
        code=str(error["code"]),
        message=error["message"],
    )


def _broken(question: Question, streamed: bool, how: str) -> Outcome:
    return Outcome(question=question, streamed=streamed, broken=how)
