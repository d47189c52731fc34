"""A separate process checks a tokenizer before the server uses it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.engine.model_info import complete_config
from app.runners.tokenizer_check import CheckLimits, TokenizerChecker
from tests import tiny
from tests.runners.spawning import is_alive, linux
from tests.server_process import ROOT
from tests.waiting import wait_until

MIB = 1 << 20


def repeat_letter(letter: str, times: int) -> dict[str, Any]:
    """A normalizer that repeats one letter."""
    return {"type": "Replace", "pattern": {"String": letter}, "content": letter * times}


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def model(folder: Path, **changes: Any) -> ModelFiles:
    """changes: keys of its tokenizer.json."""
    file = tiny.write(folder) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return complete_config(store.find(str(folder)))


def check(files: ModelFiles, **limits: Any) -> None:
    asyncio.run(TokenizerChecker(lambda _: False, CheckLimits(**limits)).check(files))


def check_error(files: ModelFiles, **limits: Any) -> str:
    with pytest.raises(AppError) as caught:
        check(files, **limits)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_valid_tokenizer_passes(tmp_path: Path) -> None:
    check(model(tmp_path / "fine"))


@pytest.mark.product
@pytest.mark.parametrize("name", ["qwen3", "phi-3", "mistral-v3", "falcon"])
def test_real_tokenizers_pass_in_a_quarter_of_the_memory_and_time(
    tmp_path: Path, shared: Path, name: str
) -> None:
    found = model(tmp_path / name)
    real = replace(found, tokenizer_path=shared / "tokenizers" / name / "tokenizer.json")
    check(real, memory=512 * MIB, cpu=15)


def test_a_tokenizer_that_aborts_the_process_is_rejected(tmp_path: Path) -> None:
    """A text of many lines needs too much memory, which ends the process with SIGABRT."""
    files = model(tmp_path / "lines", normalizer=repeat_letter("\n", 900))
    message = check_error(files, memory=160 * MIB)
    assert message.startswith(f"{files.tokenizer_path} is not a usable tokenizer: checking it ")
    assert "needs more than 1" in message
    assert message.endswith(" MiB of memory")


def test_a_tokenizer_that_never_ends_is_rejected(tmp_path: Path) -> None:
    slow = split(r"x{0,60}x{0,60}x{0,60}\b\B")
    files = model(tmp_path / "slow", pre_tokenizer=slow)
    assert check_error(files, cpu=2).endswith("takes more than 2 s of CPU time")


def test_a_check_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    files = model(tmp_path / "model")
    with pytest.raises(
        AppError, match=r"the check of the tokenizer took longer than 0\.5 s"
    ) as caught:
        check(files, wall=0.5)
    assert (caught.value.kind, caught.value.retry_after) == (ErrorKind.OVERLOADED, 10)
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_an_invalid_tokenizer_gives_the_same_error(tmp_path: Path) -> None:
    files = model(tmp_path / "broken", model={"type": "Novel"})
    assert check_error(files).startswith(f"{files.tokenizer_path} is not a usable tokenizer: ")
    bomb = {"type": "Sequence", "normalizers": [repeat_letter("a", 1000)] * 6}
    files = model(tmp_path / "bomb", normalizer=bomb)
    assert "its normalizers can make a text 1e+18 times as long" in check_error(files)


def test_a_tokenizer_that_panics_for_some_texts_passes(tmp_path: Path) -> None:
    check(model(tmp_path / "split", pre_tokenizer=split("(x+x+)+y")))


def test_a_tokenizer_whose_tokens_decode_to_too_much_text_is_rejected(tmp_path: Path) -> None:
    decoder = {
        "type": "Sequence",
        "decoders": [repeat_letter("a", 60), {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    vocabulary = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "a" * 2_000_000: 256}
    bpe = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True}
    files = model(
        tmp_path / "long", model=bpe, decoder=decoder, pre_tokenizer=None, added_tokens=[]
    )
    assert "its tokens decode to more than 64 MiB of text" in check_error(files)


def test_an_unchanged_file_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the second check no Python can be started."""
    files = model(tmp_path / "fine")
    broken = model(tmp_path / "broken", model={"type": "Novel"})
    checker = TokenizerChecker(lambda _: False)

    async def run() -> None:
        await asyncio.gather(checker.check(files), checker.check(files))
        with pytest.raises(AppError, match="is not a usable tokenizer"):
            await checker.check(broken)
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        await checker.check(files)
        with pytest.raises(AppError, match="is not a usable tokenizer"):
            await checker.check(broken)
        os.utime(files.tokenizer_path, ns=(1, 1))
        with pytest.raises(
            AppError, match="cannot start a process to check the tokenizer"
        ) as caught:
            await checker.check(files)
        assert caught.value.kind is ErrorKind.ENGINE
        monkeypatch.undo()
        await checker.check(files)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "kind"), [("KILL", ErrorKind.OVERLOADED), ("SEGV", ErrorKind.MODEL_FILES)]
)
def test_a_check_that_was_killed_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: ErrorKind
) -> None:
    """The model was refused until the server restarted, although only one process was killed."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nulimit -c 0\nkill -{name} $$\n")
    python.chmod(0o755)
    files = model(tmp_path / "model")
    checker = TokenizerChecker(lambda _: False)

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(python))
            with pytest.raises(AppError, match=f"its process was killed by SIG{name}") as caught:
                await checker.check(files)
            assert caught.value.kind is kind
        await checker.check(files)

    asyncio.run(run())


def test_a_check_that_was_killed_once_does_not_fail_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request got 503, although the next check would have succeeded."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ -e {tmp_path}/killed ] && exec {sys.executable} "$@"\n'
        f"touch {tmp_path}/killed\nkill -KILL $$\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    asyncio.run(TokenizerChecker(lambda _: False).check(model(tmp_path / "model")))
    assert (tmp_path / "killed").exists()


def test_a_check_that_took_too_long_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def time_out(*_: object) -> None:
        raise TimeoutError

    files = model(tmp_path / "model")
    checker = TokenizerChecker(lambda _: False)

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("app.runners.tokenizer_check.run_module", time_out)
            with pytest.raises(AppError) as caught:
                await checker.check(files)
            assert caught.value.kind is ErrorKind.OVERLOADED
        await checker.check(files)

    asyncio.run(run())


def test_the_builtin_tokenizer_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    asyncio.run(TokenizerChecker(store.is_builtin).check(store.find(None)))


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    files = model(tmp_path / "gone")
    files.tokenizer_path.unlink()
    assert "cannot be read: No such file" in check_error(files)


HANG = """
import os, sys
sys.path.insert(0, {root!r})
import app.text.tokenizer_probe as it, app.runners.parent_watch as line

def probe_tokenizer(_):
    open({pid_file!r}, "w").write(f"{{os.getpid()}}\\n")
    os.read(os.pipe()[0], 1)

it.probe_tokenizer = probe_tokenizer
line.tie_to_parent = lambda: None
"""

CHECK = """
import asyncio, sys
from app import store
from app.runners.tokenizer_check import TokenizerChecker
asyncio.run(TokenizerChecker(lambda _: False).check(store.find(sys.argv[1])))
"""


def test_the_process_exits_when_its_parent_is_killed(
    tiny_model: Path, tmp_path: Path, plant: Callable[[str], None]
) -> None:
    pid_file = tmp_path / "pid"
    plant(HANG.format(pid_file=str(pid_file), root=str(ROOT)))
    with subprocess.Popen([sys.executable, "-c", CHECK, str(tiny_model)], cwd=ROOT) as parent:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        process = int(pid_file.read_text())
        assert is_alive(process)
        parent.kill()
    wait_until(lambda: not is_alive(process))


WATCH_MEMORY = """
import resource, time
from app.runners.tokenizer_check_main import watch_memory
held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
watch_memory(held + (100 << 20))
more = b"x" * (held + (200 << 20))
time.sleep(60)
"""


@linux
def test_memory_is_limited_without_support_of_the_system() -> None:
    """As on macOS. Linux counts in units of 1024 bytes."""
    done = subprocess.run([sys.executable, "-c", WATCH_MEMORY], cwd=ROOT, timeout=60)
    assert done.returncode == 4
