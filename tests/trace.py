"""`make trace`: the files of ours that a streamed chat request uses, and the cost of each token.

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
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = (f"{ROOT}/app/", f"{ROOT}/models/")
NUM_TOKENS = 16
# tokens whose calls are counted: the first ones share a turn of the loop with the prompt
STEADY = range(4, NUM_TOKENS - 2)


class Recorder:
    """Records calls of our functions, by thread and by the number of tokens sent before."""

    def __init__(self) -> None:
        self.on = False
        self.num_sent = 0
        self.idle: set[CodeType] = set()
        self.idle_created: set[str] = set()
        self.calls: dict[tuple[int, int], Counter[CodeType]] = defaultdict(Counter)
        self.created: dict[str, list[tuple[int, str]]] = {"task": [], "timer": []}

    def record_idle(self, seconds: float) -> None:
        """Records the calls of an idle server, such as the watchdog's, which are not part of a
        request."""
        self.on = True
        time.sleep(seconds)
        self.on = False
        self.idle = set().union(*self.calls.values())
        self.idle_created = {where for created_ in self.created.values() for _, where in created_}
        self.calls.clear()
        for created_ in self.created.values():
            created_.clear()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(OURS):
                self.calls[threading.get_ident(), self.num_sent][code] += 1

    def count(self, kind: str, create: Callable[..., Any]) -> Callable[..., Any]:
        """`create`, with a record of the calls by our code."""

        def counting_create(*args: Any, **kwargs: Any) -> Any:
            # skip asyncio's own functions, to find their caller
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and "/asyncio/" in frame.f_code.co_filename:
                frame = frame.f_back
            if self.on and frame is not None and frame.f_code.co_filename.startswith(OURS):
                where = f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"
                self.created[kind].append((self.num_sent, where))
            return create(*args, **kwargs)

        return counting_create


def send_chat(connection: http.client.HTTPConnection, recorder: Recorder | None = None) -> None:
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
        recorder.record_idle(seconds=6)  # longer than the interval of the maintenance
        recorder.on = True
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(question).encode(), headers)
    for line in connection.getresponse():
        if recorder is not None and line.startswith(b"data: {"):
            recorder.num_sent += 1
    if recorder is not None:
        recorder.on = False


def report(recorder: Recorder, loop_thread: int) -> str:
    def files(codes: Iterable[CodeType]) -> set[str]:
        return {str(Path(code.co_filename).relative_to(ROOT)) for code in codes}

    all_functions = set().union(*recorder.calls.values()) - recorder.idle
    per_token: dict[bool, set[str]] = {}
    per_token_calls: dict[bool, list[int]] = {}
    calls: dict[bool, Counter[CodeType]] = {}
    for is_loop in (True, False):
        tokens: dict[int, Counter[CodeType]] = {token: Counter() for token in STEADY}
        for (thread, token), counted in recorder.calls.items():
            if token in STEADY and (thread == loop_thread) == is_loop:
                tokens[token].update({c: n for c, n in counted.items() if c not in recorder.idle})
        # files of most tokens: rare calls do not count
        counts = Counter(chain.from_iterable(files(codes) for codes in tokens.values()))
        per_token[is_loop] = {name for name, count in counts.items() if 2 * count > len(STEADY)}
        per_token_calls[is_loop] = [codes.total() for codes in tokens.values()]
        calls[is_loop] = sum(tokens.values(), Counter[CodeType]())
    lines = [
        f"files of ours for the whole request: {len(files(all_functions))}, "
        f"with {len(all_functions)} functions",
        *(f"    {name}" for name in sorted(files(all_functions))),
        f"files per token on the event loop: {len(per_token[True])}",
        *(f"    {name}" for name in sorted(per_token[True])),
        f"files per token on other threads: {len(per_token[False])}",
        *(f"    {name}" for name in sorted(per_token[False])),
    ]
    for is_loop, name in ((True, "on the event loop"), (False, "on other threads")):
        lines.append(f"calls of ours per token {name}: {median(per_token_calls[is_loop]):g}")
        lines += [
            f"    {count / len(STEADY):5.1f} {Path(code.co_filename).relative_to(ROOT)} "
            f"{code.co_qualname}"
            for code, count in sorted(calls[is_loop].items(), key=lambda item: item[0].co_filename)
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

    original_startup = UvicornServer.startup

    async def startup(self: UvicornServer, *args: Any, **kwargs: Any) -> None:
        await original_startup(self, *args, **kwargs)
        port = self.servers[0].sockets[0].getsockname()[1]
        client = threading.Thread(target=drive, args=(port, self))
        threading.setprofile(None)
        client.start()
        threading.setprofile(recorder.profile)

    def drive(port: int, server: UvicornServer) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        send_chat(connection)
        send_chat(connection, recorder)
        print(report(recorder, loop_thread), flush=True)
        server.should_exit = True

    UvicornServer.startup = startup
    loop_thread = threading.get_ident()
    sys.setprofile(recorder.profile)
    sys.exit(run_cli(["serve", "--runner", "thread", "--port", "0"]))


if __name__ == "__main__":
    main()
