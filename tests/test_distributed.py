"""Two ranks serve one model: the real launcher, the real command, on loopback.

What a rank's part of a model is stands in tests/models/test_sharding.py, and what ranks tell each
other in tests/runners/ranks.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import mlx.core as mx
import numpy as np
import pytest

import models
from tests import tiny
from tests.throttle import Throttle

Found = TypeVar("Found")

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = Path(sys.executable).parent / "mlx.launch"
PATIENCE = 60.0

# logits that are closer than this may change places between equally right computations
NEAR = 1e-4

PROMPTS = ("hello", "The quick brown fox jumps over the lazy dog. " * 8, "x", "to be or not to be")

# an answer that never ends by itself on `long_model`
LONG: dict[str, Any] = {"max_tokens": tiny.LONG // 2, "ignore_eos": True}


class Launched:
    """Ranks of a running `mlxrunner serve`. pids: of rank 0 and rank 1."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [LAUNCHER, "-n", "2", "--backend", "ring", "-p", str(two_free_ports())]
        ours = ["-m", "app", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            [*command, "--python", sys.executable, "--", *ours],
            cwd=ROOT,
            stdin=subprocess.PIPE,  # the launcher reads it without pause where it is at its end
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

    def ready(self) -> "Launched":
        self.port = int(self.says(r"running on http://[^:]+:(\d+)"))
        self.pids = (
            int(self.says(r"Started server process \[(\d+)\]")),
            int(self.says(r"rank 1 of 2 is ready \(process (\d+)\)")),
        )
        self.says(r"(tiny is ready after)")
        return self

    def says(self, pattern: str) -> str:
        until(lambda: re.search(pattern, self.text), self)
        [found, *_] = re.findall(pattern, self.text)
        return found

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = httpx.post(self._url(path), json={"model": "tiny", **body}, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        return reply.json()

    @contextlib.contextmanager
    def streaming(self, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Events of a completion, from the first on."""
        asked = {"model": "tiny", "prompt": "hello", "stream": True, **body}
        with httpx.stream("POST", self._url("/v1/completions"), json=asked, timeout=PATIENCE) as on:
            lines = (line.removeprefix("data: ") for line in on.iter_lines())
            yield (json.loads(line) for line in lines if line.startswith("{"))

    def running(self) -> int:
        return httpx.get(self._url("/v1/status")).json()["Running"]

    def end(self) -> None:
        """Returns when the launcher and all ranks have ended."""
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pid in self.pids:
            until(lambda pid=pid: not alive(pid), self)

    def status(self, rank: int) -> int:
        """What a rank exited with, as the launcher tells it; its own status is always 0."""
        found = re.search(rf"rank {rank} exited with code (-?\d+)", self.text)
        return int(found[1]) if found else 0

    def close(self) -> None:
        """Whatever is left."""
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


def until(found: Callable[[], Found], launched: Launched) -> Found:
    deadline = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < deadline, launched.text
        time.sleep(0.05)
    return value


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def two_free_ports() -> int:
    """The first of two that stand side by side; a ring listens on one for each rank."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            with (
                contextlib.suppress(OSError, OverflowError),
                socket.create_server(("127.0.0.1", port + 1)),
            ):
                return port


@contextlib.contextmanager
def launched(*arguments: str) -> Iterator[Launched]:
    ranks = Launched(arguments)
    try:
        yield ranks.ready()
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def ranks(long_model: Path) -> Iterator[Launched]:
    with launched(str(long_model)) as running:
        yield running


def whole_model(prompt: str, count: int) -> list[tuple[int, np.ndarray]]:
    """What one process says: greedy ids, each with the log-probabilities that it was chosen by."""
    model = models.build(tiny.CONFIG, tiny.weights())
    kv, fed, said = model.make_kv(), list(prompt.encode()), list[tuple[int, np.ndarray]]()
    for _ in range(count):
        logits = model.logits(model(mx.array([fed]), kv)[:, -1])[0]
        scores = np.array(logits - mx.logsumexp(logits))
        said.append((int(scores.argmax()), scores))
        fed = [said[-1][0]]
    return said


def answered(ranks: Launched, prompt: str) -> dict[str, Any]:
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": 16, "logprobs": 1}
    return ranks.post("/v1/completions", {**asked, "ignore_eos": True, "return_token_ids": True})


def test_answers_are_those_of_one_process(ranks: Launched, ties: list[int]) -> None:
    """Side by side, so that batches and chunked prompts are among them."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        replies = list(pool.map(lambda prompt: answered(ranks, prompt), PROMPTS))
    met = 0
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        [choice] = reply["choices"]
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) == 16
        expected = whole_model(prompt, 16)
        for id, logprob, (wanted, scores) in zip(
            choice["token_ids"], logprobs, expected, strict=True
        ):
            if id != wanted:
                assert scores[wanted] - scores[id] < NEAR
                met += 1
                break  # from here on both are right, and different
            assert abs(scores[id] - logprob) < NEAR
    ties.append(met)


def test_what_is_sampled_constrained_or_embedded_is_the_same_on_both(ranks: Launched) -> None:
    """Were anything computed otherwise on rank 1, the next step would end both."""
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
    assert answered(ranks, "and on")["usage"]["completion_tokens"] == 16


def test_a_client_that_hangs_up_ends_its_answer_on_both(ranks: Launched) -> None:
    with ranks.streaming(**LONG) as events:
        next(events)
        assert ranks.running() == 1
    until(lambda: ranks.running() == 0, ranks)
    assert answered(ranks, "hello")["usage"]["completion_tokens"] == 16


def test_ranks_with_nothing_to_do_take_no_time(ranks: Launched) -> None:
    def used() -> float:
        fields = [Path(f"/proc/{pid}/stat").read_text().split() for pid in ranks.pids]
        return sum(int(field) for of in fields for field in of[13:15]) / os.sysconf("SC_CLK_TCK")

    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc to tell what processes take")
    before = used()
    time.sleep(1.0)
    assert used() - before < 0.2


def test_the_loss_of_rank_1_is_told_by_name_and_ends_the_server(long_model: Path) -> None:
    with launched(str(long_model)) as ranks:
        with ranks.streaming(**LONG) as events:
            next(events)
            os.kill(ranks.pids[1], signal.SIGKILL)
            *_, last = events
        assert re.search(r"rank 1 \(.*\) disconnected", last["error"]["message"])
        ranks.end()
        # by itself, or told to by the launcher, whichever comes first
        assert ranks.status(0) in (1, -signal.SIGTERM)


def test_told_to_stop_they_finish_their_answers_and_leave_nobody(
    tiny_model: Path, throttle: Throttle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager tells the launcher, which dies of it, and all ranks at once."""
    for name, value in throttle.on().variables.items():
        monkeypatch.setenv(name, value)
    with launched(str(tiny_model)) as ranks:
        with ranks.streaming(max_tokens=50, ignore_eos=True) as events:
            next(events)
            os.killpg(ranks.process.pid, signal.SIGTERM)
            said = list(events)
        assert said[-1]["choices"][0]["finish_reason"] == "length"
        ranks.end()


def test_the_loss_of_rank_0_ends_rank_1(tiny_model: Path) -> None:
    with launched(str(tiny_model)) as ranks:
        os.kill(ranks.pids[0], signal.SIGKILL)
        ranks.end()
        assert ranks.status(1) == 1
        assert "rank 0 disconnected" in ranks.text
