"""The worker of the llama.cpp backend, with the low-level API of llama-cpp-python.

    PYTHON -m tests.bench.cpu_llama FILE THREADS

It needs a Python with llama-cpp-python, and does not use MLX. Decoding is greedy, as in the other
backends. There is a context for each number of streams, as in a server with this parallelism.
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
# an ordinary token, after the bytes
FIRST = 1000


@llama.llama_log_callback
def discard_log(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


class LlamaContext:
    """rows: number of sequences, with `capacity` positions each."""

    def __init__(self, model: Any, threads: int, rows: int, capacity: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = rows * capacity, rows
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(model, params)
        assert self._context, "no context"
        self._memory = llama.llama_get_memory(self._context)
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
        """The most likely next tokens. items: (token, position, row, whether to compute logits)."""
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (token, position, row, needs_logits) in enumerate(items):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = needs_logits
        assert llama.llama_decode(self._context, batch) == 0
        count = sum(needs_logits for *_, needs_logits in items)
        logits = llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (count, self._vocab)).argmax(axis=1).tolist()


class LlamaWorker:
    def __init__(self, file: str, threads: int) -> None:
        llama.llama_log_set(discard_log, ctypes.c_void_p(0))
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(file.encode(), params)
        assert self._model, f"{file} is not loaded"
        self._threads = threads
        self._contexts: dict[tuple[int, int], LlamaContext] = {}

    def measure(self, request: dict[str, Any]) -> tuple[float, int]:
        if request["streams"] == 0:
            return self._prefill(request["prompt"], request["budget"])
        return self._decode(request["streams"], request["cached"], request["budget"])

    def _prefill(self, length: int, budget: float) -> tuple[float, int]:
        context = self._get_context(1, length)
        found: list[float] = []
        begun = time.perf_counter()
        while not found or time.perf_counter() - begun < budget:
            context.clear()
            started = time.perf_counter()
            context.prompt(0, length)
            found.append(time.perf_counter() - started)
        return length / statistics.median(found), length

    def _decode(self, streams: int, cached: int, budget: float) -> tuple[float, int]:
        """The first step is not timed, as in the other backends."""
        context = self._get_context(streams, ROOM)
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

    def _get_context(self, rows: int, capacity: int) -> LlamaContext:
        if (rows, capacity) not in self._contexts:
            self._contexts[rows, capacity] = LlamaContext(
                self._model, self._threads, rows, capacity
            )
        return self._contexts[rows, capacity]


if __name__ == "__main__":
    runs_on = f"llama-cpp-python {llama.__version__}"
    serve_measurements(LlamaWorker(sys.argv[1], int(sys.argv[2])).measure, runs_on)
