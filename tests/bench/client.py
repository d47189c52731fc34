"""A client that records when each token arrives."""

import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

TIMEOUT = 1200.0


@dataclass(frozen=True, kw_only=True)
class StreamTiming:
    """arrivals: seconds from the request to each piece of text. tokens, cached: counts of the
    server. A token that is half a character has no text."""

    arrivals: Sequence[float]
    tokens: int
    cached: int

    @property
    def ttft(self) -> float:
        return self.arrivals[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second from the first to the last token."""
        return (self.tokens - 1) / (self.arrivals[-1] - self.arrivals[0])


def stream_completion(url: str, model: str, prompt: str, max_tokens: int) -> StreamTiming:
    """Run one greedy, streamed completion."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals: list[float] = []
    usage = None
    begun = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter() - begun
            chunk = json.loads(line[6:])
            usage = chunk["usage"] or usage
            if any(choice["text"] for choice in chunk["choices"]):
                arrivals.append(now)
    assert usage is not None
    assert usage["completion_tokens"] == max_tokens
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return StreamTiming(arrivals=arrivals, tokens=max_tokens, cached=cached)


def make_prompt(tokens: int, seed: int) -> str:
    """A prompt with `tokens` tokens of the byte tokenizer, different for each seed."""
    letters = random.Random(seed).choices("abcdefgh ijklmnop", k=tokens)
    return "".join(letters)


def get_rss(pid: int) -> int:
    """Resident memory of a process in bytes (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def format_spread(values: Sequence[float]) -> str:
    """median (minimum to maximum)"""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def percentile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
