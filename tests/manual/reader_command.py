"""`mlxrunner` as a reader of the manual runs it: the real program, with the actions of a reader.

- `serve` runs until its models are ready, and then gets SIGTERM. If READER_SERVERS names a folder,
  it keeps running in the background, and the next server on its port replaces it.
- `run` without a prompt is a chat in a terminal: this file types a message and ends the chat.
- `bench` sends few requests, because its defaults take minutes.
- `doctor` may exit with 1, if it prints a problem of this machine.

Reader starts the program directly for the other commands. READER_MEMO names a folder: a command
that changes no file runs once for all pages.

Knows: the command line, the log of the server. Must not know: the manual.
"""

import hashlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAM = (sys.executable, "-m", "app")
TIMEOUT = 60.0

# The last value of an option is the valid one.
FEW_REQUESTS = (
    *("--num-prompts", "2", "--num-warmups", "1", "--rounds", "1"),
    *("--output-len", "4"),
)

# These change no file that a later command of a page reads.
REPEATABLE = frozenset({"bench", "doctor", "run", "serve", "show"})


def main(words: Sequence[str]) -> int:
    command = words[0] if words else ""
    memo = _find_memo(words) if command in REPEATABLE else None
    if memo is not None and memo.exists():
        return 0
    if command == "serve":
        status = _serve(words)
    elif command == "run" and not _has_prompt(words):
        status = _chat(words)
    else:
        more = FEW_REQUESTS if command == "bench" else ()
        status = subprocess.run([*PROGRAM, *words, *more], check=False).returncode
        if command == "doctor" and status == 1:
            status = 0
    if memo is not None and status == 0:
        memo.touch()
    return status


def _find_memo(words: Sequence[str]) -> Path | None:
    folder = os.environ.get("READER_MEMO")
    if not folder or "READER_SERVERS" in os.environ:
        return None
    text = "\0".join(words).replace(os.getcwd(), "").replace(os.environ["HOME"], "")
    text = re.sub(r":\d{4,5}\b|\0--port\x000$", "", text)
    return Path(folder) / hashlib.sha256(text.encode()).hexdigest()


def _serve(words: Sequence[str]) -> int:
    """Returns the exit status of the server, which must have become ready."""
    kept = os.environ.get("READER_SERVERS")
    environment = {**os.environ}
    if kept:
        port = words[words.index("--port") + 1] if "--port" in words else os.environ["READER_PORT"]
        environment["MLXRUNNER_PORT"] = port
        record = Path(kept) / port
        _stop_kept(record)
    else:
        environment["MLXRUNNER_PORT"] = "0"
        record = None
    log = Path(os.environ["READER_LOGS"]) / f"{os.getpid()}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*PROGRAM, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=bool(kept),
        )
    _wait_until_ready(process, log)
    if record is not None:
        record.write_text(str(process.pid), "utf-8")
        return 0
    process.send_signal(signal.SIGTERM)
    status = process.wait(TIMEOUT)
    return 0 if status in (0, -signal.SIGTERM) else status


def _stop_kept(record: Path) -> None:
    if not record.exists():
        return
    pid = int(record.read_text("utf-8"))
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + TIMEOUT
    while _is_listening(int(record.name)):
        assert time.monotonic() < deadline, f"the server {pid} does not stop"
        time.sleep(0.02)
    record.unlink()


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        text = log.read_text("utf-8")
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"the server did not become ready:\n{text}")
        found = re.search(r"running on http://[^:\s]+:(\d+)", text)
        if found and _is_ready(f"http://127.0.0.1:{found[1]}/health"):
            return
        time.sleep(0.05)


def _is_ready(address: str) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as reply:
            return reply.status == 200
    except urllib.error.HTTPError:  # 503 while a model loads
        return False


def _has_prompt(words: Sequence[str]) -> bool:
    """Whether `run` has a prompt after the model, or one from a pipe."""
    is_pipe = stat.S_ISFIFO(os.fstat(0).st_mode)
    return is_pipe or sum(not word.startswith("-") for word in words[1:]) > 1


def _chat(words: Sequence[str]) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.terminal_process import TerminalProcess

    with TerminalProcess([*PROGRAM, *words]) as terminal:
        if "download" in terminal.wait_for(r">>> |download [^\n]*\? ")[0]:
            terminal.type("y\r")
            terminal.wait_for(">>> ")
        terminal.type("What is mlxrunner?\r")
        terminal.wait_for(r"mlxrunner\?\s[\s\S]+>>> ")
        terminal.type("/bye\r")
        status = terminal.wait()
        print(terminal.plain_output)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
