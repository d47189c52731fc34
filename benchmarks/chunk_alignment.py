"""The cost of bit-equal caching: prefill in chunks with a fixed alignment.

There are two costs. Speed: chunks have the length of the alignment, so that each position is always
evaluated with the same shapes. Work: a prefix is reused only up to a multiple of the alignment, and
an answer never (decoded tokens used other kernels), so tokens are evaluated again.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from benchmarks import client, random_model
from models.base import Model

ALIGNMENTS = (32, 64, 128, 256, 512)
TOKENS, ROUNDS = 1024, 3

# (new prompt tokens, answer tokens) of each turn: a chat with a short system prompt
CHAT = [(220, 180), (40, 210), (35, 160), (60, 240), (25, 120), (80, 200)]
# a coding agent: a long system prompt, long tool results, short answers
AGENT = [(2400, 60), (700, 45), (1500, 80), (300, 40), (900, 60), (500, 120)]


def measure_prefill_rate(model: Model, chunk: int, seed: int) -> float:
    """Tokens per second over TOKENS tokens in chunks of that length."""
    ids = list(client.make_prompt(TOKENS, seed).encode())
    kv = model.make_kv()
    begun = time.perf_counter()
    for start in range(0, TOKENS, chunk):
        model(mx.array([ids[start : start + chunk]]), kv)
        mx.eval([array for layer in kv for array in layer.state()])
    return TOKENS / (time.perf_counter() - begun)


def count_computed_tokens(turns: Sequence[tuple[int, int]], alignment: int | None) -> int:
    """Total prompt tokens that a conversation evaluates. alignment None: longest common prefix."""
    length = reusable = total = 0
    for fresh, answer in turns:
        prompt = length + fresh
        total += prompt - min(reusable, prompt - 1)
        length = prompt + answer
        # without alignment, all but the last sampled token is cached; with it, only full chunks
        reusable = length - 1 if alignment is None else prompt - prompt % alignment
    return total


def report(folder: Path) -> str:
    model = random_model.load(folder)
    rates: dict[int, list[float]] = {alignment: [] for alignment in ALIGNMENTS}
    for turn in range(ROUNDS):
        for alignment in ALIGNMENTS:
            rates[alignment].append(measure_prefill_rate(model, alignment, seed=turn))
    lines = [
        f"prefill in aligned chunks ({TOKENS} tokens), and prompt tokens that two "
        "conversations compute:",
        "| alignment | tokens/s | relative to 512 | chat | agent |",
        "|---|---|---|---|---|",
        f"| none | | | {count_computed_tokens(CHAT, None)} | "
        f"{count_computed_tokens(AGENT, None)} |",
    ]
    for grid in ALIGNMENTS:
        ratios = [a / b for a, b in zip(rates[grid], rates[512], strict=True)]
        lines.append(
            f"| {grid} | {client.format_spread(rates[grid])} | {client.format_spread(ratios)} "
            f"| {count_computed_tokens(CHAT, grid)} | {count_computed_tokens(AGENT, grid)} |"
        )
    return "\n".join(lines)
