"""Single requests and figures that several benchmarks share."""

import asyncio
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from app.bench.client import (
    ConnectionPool,
    RequestRecord,
    ServerAddress,
    StreamedRequest,
    make_stream_body,
)

TIMEOUT = 1200.0


def stream_completion(url: str, model: str, prompt: str, max_tokens: int) -> RequestRecord:
    """Run one greedy, streamed completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    pool = ConnectionPool(ServerAddress.parse(url))
    request = StreamedRequest(pool, "/v1/completions", make_stream_body(body))
    record = asyncio.run(request.run(TIMEOUT))
    assert record.error is None, record.error
    assert record.output_tokens == max_tokens
    return record


def make_prompt(tokens: int, seed: int | str) -> str:
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
