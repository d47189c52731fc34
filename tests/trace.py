"""`make trace`: which of our files a streamed chat request runs through, and what each token costs.

The built-in model in this process (`--runner thread`), the second request of a connection, 16
streamed tokens, no tools. Every call of a Python function of ours is recorded with `sys.setprofile`
and `threading.setprofile`; on the event loop's thread also each task and timer that our code
creates.
"""

import asyncio
import http.client
import json
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = (f"{ROOT}/app/", f"{ROOT}/models/")
NUM_TOKENS = 16
# tokens whose work is counted: the first ones share their turn of the loop with the prompt
STEADY = range(4, NUM_TOKENS - 2)


class Recorder:
    """Calls of functions of ours, by thread and by the number of tokens sent before."""

    def __init__(self) -> None:
        self.on = False
        self.num_sent = 0
        self.idle: set[CodeType] = set()
        self.idle_created: set[str] = set()
        self.calls: dict[tuple[int, int], set[CodeType]] = defaultdict(set)
        self.created: dict[str, list[tuple[int, str]]] = {"task": [], "timer": []}

    def record_idle(self, seconds: float) -> None:
        """What runs while there is no request, such as the watchdog, is not part of one."""
        self.on = True
        time.sleep(seconds)
        self.on = False
        self.idle = set().union(*self.calls.values())
        self.idle_created = {where for made in self.created.values() for _, where in made}
        self.calls.clear()
        for made in self.created.values():
            made.clear()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(OURS):
                self.calls[threading.get_ident(), self.num_sent].add(code)

    def count(self, kind: str, create: Callable[..., Any]) -> Callable[..., Any]:
        """`create` as it was, with a record of calls that our code makes."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            # through asyncio's own functions to whoever called them
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and "/asyncio/" in frame.f_code.co_filename:
                frame = frame.f_back
            if self.on and frame is not None and frame.f_code.co_filename.startswith(OURS):
                where = f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"
                self.created[kind].append((self.num_sent, where))
            return create(*args, **kwargs)

        return counted


def ask(connection: http.client.HTTPConnection, recorder: Recorder | None = None) -> None:
    connection.request("GET", "/v1/models")
    model = json.load(connection.getresponse())["data"][0]["id"]
    question = {
        "model": model,
        "messages": [{"role": "user", "content": "What is MLX?"}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    if recorder is not None:
        recorder.record_idle(seconds=3)
        recorder.on = True
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(question).encode(), headers)
    for line in connection.getresponse():
        if recorder is not None and line.startswith(b"data: {"):
            recorder.num_sent += 1
    if recorder is not None:
        recorder.on = False


def report(recorder: Recorder, loop_thread: int) -> str:
    def files(codes: set[CodeType]) -> set[str]:
        return {str(Path(code.co_filename).relative_to(ROOT)) for code in codes}

    everything = set().union(*recorder.calls.values()) - recorder.idle
    per_token: dict[bool, set[str]] = {}
    for is_loop in (True, False):
        tokens: dict[int, set[str]] = defaultdict(set)
        for (thread, token), codes in recorder.calls.items():
            if token in STEADY and (thread == loop_thread) == is_loop:
                tokens[token] |= files(codes - recorder.idle)
        # those of most tokens: what happens once in a while costs no token anything
        counts = Counter(chain.from_iterable(tokens.values()))
        per_token[is_loop] = {name for name, count in counts.items() if 2 * count > len(STEADY)}
    lines = [
        f"files of ours for the whole request: {len(files(everything))}, "
        f"with {len(everything)} functions",
        *(f"    {name}" for name in sorted(files(everything))),
        f"files per token on the event loop: {len(per_token[True])}",
        *(f"    {name}" for name in sorted(per_token[True])),
        f"files per token on other threads: {len(per_token[False])}",
        *(f"    {name}" for name in sorted(per_token[False])),
    ]
    for kind, all_created in recorder.created.items():
        created = [item for item in all_created if item[1] not in recorder.idle_created]
        steady = [where for token, where in created if token in STEADY]
        lines.append(
            f"{kind}s of ours per token: {len(steady) / len(STEADY):.2f} "
            f"({len(created)} in the whole request: {sorted({where for _, where in created})})"
        )
    return "\n".join(lines)


def main() -> None:
    recorder = Recorder()
    threading.setprofile(recorder.profile)
    loop_class: Any = asyncio.SelectorEventLoop
    loop_class.create_task = recorder.count("task", loop_class.create_task)
    loop_class.call_at = recorder.count("timer", loop_class.call_at)

    from app.cli import main as run_cli
    from app.http.uvicorn_server import UvicornServer

    started = UvicornServer.startup

    async def startup(self: UvicornServer, *args: Any, **kwargs: Any) -> None:
        await started(self, *args, **kwargs)
        port = self.servers[0].sockets[0].getsockname()[1]
        client = threading.Thread(target=drive, args=(port, self))
        threading.setprofile(None)
        client.start()
        threading.setprofile(recorder.profile)

    def drive(port: int, server: UvicornServer) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        ask(connection)
        ask(connection, recorder)
        print(report(recorder, loop_thread), flush=True)
        server.should_exit = True

    UvicornServer.startup = startup
    loop_thread = threading.get_ident()
    sys.setprofile(recorder.profile)
    sys.exit(run_cli(["serve", "--runner", "thread", "--port", "0"]))


if __name__ == "__main__":
    main()
