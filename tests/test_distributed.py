"""Two ranks serve one model: the real launcher, the real command, on loopback.

tests/models/test_sharding.py tests the shards of a model, and tests/runners/ranks the messages
between ranks.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from models import architectures
from tests import tiny
from tests.ports import find_free_port
from tests.throttle import Throttle
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = Path(sys.executable).parent / "mlx.launch"
PATIENCE = 60.0

# the order of logits that are closer than this may differ between correct computations
TOLERANCE = 1e-4

PROMPTS = ("hello", "The quick brown fox jumps over the lazy dog. " * 8, "x", "to be or not to be")

# an endless answer of `long_model`
LONG: dict[str, Any] = {"max_tokens": tiny.LONG // 2, "ignore_eos": True}


class LaunchedServer:
    """The ranks of a running `mlxrunner serve`. pids: of rank 0 and rank 1."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [LAUNCHER, "-n", "2", "--backend", "ring", "-p", str(find_free_port(count=2))]
        arguments_ = ["-m", "app", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            [*command, "--python", sys.executable, "--", *arguments_],
            cwd=ROOT,
            stdin=subprocess.PIPE,  # the launcher reads it in a busy loop at end of file
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "".join(self._log)

    def wait_until_ready(self) -> "LaunchedServer":
        self.port = int(self.wait_for_log(r"running on http://[^:]+:(\d+)"))
        self.pids = (
            int(self.wait_for_log(r"Started server process \[(\d+)\]")),
            int(self.wait_for_log(r"rank 1 of 2 is ready \(process (\d+)\)")),
        )
        self.wait_for_log(r"(tiny is ready after)")
        return self

    def wait_for_log(self, pattern: str) -> str:
        wait_until(lambda: re.search(pattern, self.text), lambda: self.text, limit=PATIENCE)
        [found, *_] = re.findall(pattern, self.text)
        return found

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = httpx.post(self._url(path), json={"model": "tiny", **body}, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        return reply.json()

    @contextlib.contextmanager
    def stream(self, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed completion."""
        body = {"model": "tiny", "prompt": "hello", "stream": True, **body}
        with httpx.stream(
            "POST", self._url("/v1/completions"), json=body, timeout=PATIENCE
        ) as reply:
            lines = (line.removeprefix("data: ") for line in reply.iter_lines())
            yield (json.loads(line) for line in lines if line.startswith("{"))

    def num_running(self) -> int:
        return httpx.get(self._url("/v1/status"), timeout=PATIENCE).json()["Running"]

    def wait_until_ended(self) -> None:
        """Returns when the launcher and all ranks have ended."""
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pid in self.pids:
            wait_until(lambda pid=pid: not is_alive(pid), lambda: self.text, limit=PATIENCE)

    def status(self, rank: int) -> int:
        """The exit status of a rank, as the launcher reports it; its own status is always 0."""
        found = re.search(rf"rank {rank} exited with code (-?\d+)", self.text)
        return int(found[1]) if found else 0

    def close(self) -> None:
        """Kill all remaining processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._log.extend(self.process.stdout)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def launch(*arguments: str) -> Iterator[LaunchedServer]:
    ranks = LaunchedServer(arguments)
    try:
        yield ranks.wait_until_ready()
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def ranks(long_model: Path) -> Iterator[LaunchedServer]:
    with launch(str(long_model)) as server:
        yield server


def compute_reference(prompt: str, count: int) -> list[tuple[int, np.ndarray]]:
    """The answer of one process: greedy ids, each with all log-probabilities."""
    model = architectures.build(tiny.CONFIG, tiny.weights())
    kv, inputs, tokens = model.make_kv(), list(prompt.encode()), list[tuple[int, np.ndarray]]()
    for _ in range(count):
        logits = model.logits(model(mx.array([inputs]), kv)[:, -1])[0]
        scores = np.array(logits - mx.logsumexp(logits))
        tokens.append((int(scores.argmax()), scores))
        inputs = [tokens[-1][0]]
    return tokens


def send_completion(ranks: LaunchedServer, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 16, "logprobs": 1}
    return ranks.post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})


def test_answers_are_those_of_one_process(ranks: LaunchedServer, ties: list[int]) -> None:
    """Concurrent requests, so that there are batches and chunked prompts."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        replies = list(pool.map(lambda prompt: send_completion(ranks, prompt), PROMPTS))
    num_ties = 0
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        [choice] = reply["choices"]
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) == 16
        expected = compute_reference(prompt, 16)
        for id, logprob, (expected_id, scores) in zip(
            choice["token_ids"], logprobs, expected, strict=True
        ):
            if id != expected_id:
                assert scores[expected_id] - scores[id] < TOLERANCE
                num_ties += 1
                break  # both are correct, but differ from here on
            assert abs(scores[id] - logprob) < TOLERANCE
    ties.append(num_ties)


def test_sampling_grammars_and_embeddings_are_equal_on_both_ranks(ranks: LaunchedServer) -> None:
    """If rank 1 computed anything differently, the next step would end both ranks."""
    hot = {"temperature": 1.5, "max_tokens": 24, "frequency_penalty": 0.5}
    one, two = (ranks.post("/v1/completions", {"prompt": "a", **hot, "seed": 7}) for _ in range(2))
    assert one["choices"] == two["choices"]
    unseeded = ranks.post("/v1/completions", {"prompt": "a", **hot, "n": 3})
    assert len({choice["text"] for choice in unseeded["choices"]}) == 3
    constrained = ranks.post(
        "/v1/completions",
        {"prompt": "a", "max_tokens": 64, "structured_outputs": {"regex": "[ab]{5}c"}},
    )
    assert re.fullmatch("[ab]{5}c", constrained["choices"][0]["text"])
    vectors = ranks.post("/v1/embeddings", {"input": ["one", "two"]})["data"]
    assert len(vectors) == 2
    assert send_completion(ranks, "and on")["usage"]["completion_tokens"] == 16


def test_a_disconnect_cancels_the_request_on_both_ranks(ranks: LaunchedServer) -> None:
    with ranks.stream(**LONG) as events:
        next(events)
        assert ranks.num_running() == 1
    wait_until(lambda: ranks.num_running() == 0, lambda: ranks.text, limit=PATIENCE)
    assert send_completion(ranks, "hello")["usage"]["completion_tokens"] == 16


@pytest.mark.timing
def test_idle_ranks_use_no_cpu_time(ranks: LaunchedServer) -> None:
    def read_cpu_seconds() -> float:
        fields = [Path(f"/proc/{pid}/stat").read_text().split() for pid in ranks.pids]
        return sum(int(field) for of in fields for field in of[13:15]) / os.sysconf("SC_CLK_TCK")

    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc for the CPU time of processes")
    before = read_cpu_seconds()
    time.sleep(1.0)
    used = read_cpu_seconds() - before
    print(f"{used:.2f} CPU seconds in one second")
    assert used < 0.2


def test_the_loss_of_rank_1_is_reported_and_ends_the_server(long_model: Path) -> None:
    with launch(str(long_model)) as ranks:
        with ranks.stream(**LONG) as events:
            next(events)
            os.kill(ranks.pids[1], signal.SIGKILL)
            *_, last = events
        assert re.search(r"rank 1 \(.*\) disconnected", last["error"]["message"])
        ranks.wait_until_ended()
        # by itself, or by the launcher, whichever comes first
        assert ranks.status(0) in (1, -signal.SIGTERM)


@pytest.mark.exhaustive
def test_sigterm_completes_the_requests_and_ends_all_ranks(
    tiny_model: Path, throttle: Throttle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager signals the launcher, which ends at once, and all ranks."""
    for name, value in throttle.on().variables.items():
        monkeypatch.setenv(name, value)
    with launch(str(tiny_model)) as ranks:
        with ranks.stream(max_tokens=50, ignore_eos=True) as events:
            next(events)
            os.killpg(ranks.process.pid, signal.SIGTERM)
            received = list(events)
        assert received[-1]["choices"][0]["finish_reason"] == "length"
        ranks.wait_until_ended()


@pytest.mark.exhaustive
def test_the_loss_of_rank_0_ends_rank_1(tiny_model: Path) -> None:
    with launch(str(tiny_model)) as ranks:
        os.kill(ranks.pids[0], signal.SIGKILL)
        ranks.wait_until_ended()
        assert ranks.status(1) == 1
        assert "rank 0 disconnected" in ranks.text
