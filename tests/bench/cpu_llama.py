"""The worker of llama.cpp's arm, through the low-level API of llama-cpp-python.

    PYTHON -m tests.bench.cpu_llama FILE THREADS

Run by a Python that has it; knows nothing of MLX. Greedy, as the other arms. A context for each
number of streams, as a server with so many places makes one.
"""

import ctypes
import statistics
import sys
import time
from typing import Any

import llama_cpp as llama  # pyright: ignore[reportMissingImports]  # of another environment
import numpy as np

from tests.bench.cpu_backends import serve_measurements

STEPS, ROOM = 16, 256
# an ordinary piece, behind the bytes
FIRST = 1000


@llama.llama_log_callback
def discard_log(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


class LlamaContext:
    """rows: of `room` positions each."""

    def __init__(self, model: Any, threads: int, rows: int, room: int) -> None:
        told = llama.llama_context_default_params()
        told.n_ctx, told.n_seq_max = rows * room, rows
        told.n_batch = told.n_ubatch = 512
        told.n_threads = told.n_threads_batch = threads
        self._held = llama.llama_init_from_model(model, told)
        assert self._held, "no context"
        self._memory = llama.llama_get_memory(self._held)
        self._batch = llama.llama_batch_init(512, 0, 1)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def clear(self) -> None:
        llama.llama_memory_clear(self._memory, False)

    def rewind(self, row: int, position: int) -> None:
        assert llama.llama_memory_seq_rm(self._memory, row, position, -1)

    def prompt(self, row: int, length: int) -> int:
        return self._evaluate([(FIRST + i, i, row, i == length - 1) for i in range(length)])[0]

    def step(self, tokens: list[int], position: int) -> list[int]:
        return self._evaluate([(token, position, row, True) for row, token in enumerate(tokens)])

    def _evaluate(self, items: list[tuple[int, int, int, bool]]) -> list[int]:
        """The likeliest next token wherever one is wanted. items: token, position, row, wanted."""
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (token, position, row, wanted) in enumerate(items):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = wanted
        assert llama.llama_decode(self._held, batch) == 0
        count = sum(wanted for *_, wanted in items)
        logits = llama.llama_get_logits(self._held)
        return np.ctypeslib.as_array(logits, (count, self._vocab)).argmax(axis=1).tolist()


class LlamaWorker:
    def __init__(self, file: str, threads: int) -> None:
        llama.llama_log_set(discard_log, ctypes.c_void_p(0))
        llama.llama_backend_init()
        told = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(file.encode(), told)
        assert self._model, f"{file} is not loaded"
        self._threads = threads
        self._contexts: dict[tuple[int, int], LlamaContext] = {}

    def measure(self, ask: dict[str, Any]) -> tuple[float, int]:
        if ask["streams"] == 0:
            return self._prefill(ask["prompt"], ask["budget"])
        return self._decode(ask["streams"], ask["cached"], ask["budget"])

    def _prefill(self, length: int, budget: float) -> tuple[float, int]:
        context = self._context(1, length)
        found: list[float] = []
        begun = time.perf_counter()
        while not found or time.perf_counter() - begun < budget:
            context.clear()
            started = time.perf_counter()
            context.prompt(0, length)
            found.append(time.perf_counter() - started)
        return length / statistics.median(found), length

    def _decode(self, streams: int, cached: int, budget: float) -> tuple[float, int]:
        """The step in front of those that are timed is as little counted as in the other arms."""
        context = self._context(streams, ROOM)
        context.clear()
        firsts = [context.prompt(row, cached) for row in range(streams)]
        found: list[float] = []
        begun = time.perf_counter()
        while not found or time.perf_counter() - begun < budget:
            for row in range(streams):
                context.rewind(row, cached)
            tokens = context.step(firsts, cached)
            started = time.perf_counter()
            for i in range(1, STEPS + 1):
                tokens = context.step(tokens, cached + i)
            found.append((time.perf_counter() - started) / STEPS)
        return streams / statistics.median(found), STEPS

    def _context(self, rows: int, room: int) -> LlamaContext:
        if (rows, room) not in self._contexts:
            self._contexts[rows, room] = LlamaContext(self._model, self._threads, rows, room)
        return self._contexts[rows, room]


if __name__ == "__main__":
    runs_on = f"llama-cpp-python {llama.__version__}"
    serve_measurements(LlamaWorker(sys.argv[1], int(sys.argv[2])).measure, runs_on)
