"""A tokenizer is tried out in a process of its own before it may work in the server's."""

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
from tests.runners.spawning import linux, lives, wait_until
from tests.server_process import ROOT

MIB = 1 << 20


def grown(letter: str, times: int) -> dict[str, Any]:
    """A normalizer that writes one letter so many times."""
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


def refused(files: ModelFiles, **limits: Any) -> str:
    with pytest.raises(AppError) as caught:
        check(files, **limits)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert "\n" not in caught.value.message
    return caught.value.message


def test_one_that_does_its_work_passes(tmp_path: Path) -> None:
    check(model(tmp_path / "fine"))


@pytest.mark.parametrize("name", ["qwen3", "phi-3", "mistral-v3", "falcon"])
def test_real_ones_pass_in_a_quarter_of_the_memory_and_time(
    tmp_path: Path, shared: Path, name: str
) -> None:
    found = model(tmp_path / name)
    real = replace(found, tokenizer_path=shared / "tokenizers" / name / "tokenizer.json")
    check(real, memory=512 * MIB, cpu=15)


def test_one_over_which_the_library_ends_the_process_is_refused(tmp_path: Path) -> None:
    """No memory for a text of many lines ends it with SIGABRT."""
    files = model(tmp_path / "lines", normalizer=grown("\n", 900))
    told = refused(files, memory=256 * MIB)
    assert told.startswith(f"{files.tokenizer_path} is not a usable tokenizer: checking it ")
    assert "needs more than 2" in told
    assert told.endswith(" MiB of memory")


def test_one_that_never_ends_is_refused(tmp_path: Path) -> None:
    slow = split(r"x{0,60}x{0,60}x{0,60}\b\B")
    files = model(tmp_path / "slow", pre_tokenizer=slow)
    assert refused(files, cpu=2).endswith("takes more than 2 s of CPU time")


def test_one_that_does_nothing_for_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    files = model(tmp_path / "model")
    assert refused(files, wall=0.5).endswith("checking it takes longer than 0.5 s")
    assert not lives(int((tmp_path / "pid").read_text()))


def test_one_that_cannot_be_read_is_refused_with_the_same_words(tmp_path: Path) -> None:
    files = model(tmp_path / "broken", model={"type": "Novel"})
    assert refused(files).startswith(f"{files.tokenizer_path} is not a usable tokenizer: ")
    bomb = {"type": "Sequence", "normalizers": [grown("a", 1000)] * 6}
    files = model(tmp_path / "bomb", normalizer=bomb)
    assert "its normalizers can make a text 1e+18 times as long" in refused(files)


def test_one_that_panics_over_some_texts_may_be_used_for_others(tmp_path: Path) -> None:
    check(model(tmp_path / "split", pre_tokenizer=split("(x+x+)+y")))


def test_one_whose_tokens_spell_more_than_can_be_held_is_refused(tmp_path: Path) -> None:
    decoder = {
        "type": "Sequence",
        "decoders": [grown("a", 60), {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    vocabulary = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "a" * 2_000_000: 256}
    bpe = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True}
    files = model(
        tmp_path / "long", model=bpe, decoder=decoder, pre_tokenizer=None, added_tokens=[]
    )
    assert "its tokens decode to more than 64 MiB of text" in refused(files)


def test_a_file_is_tried_once_as_long_as_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time there is no Python that could be started."""
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


def test_our_own_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    asyncio.run(TokenizerChecker(store.is_builtin).check(store.find(None)))


def test_a_file_that_went_away_is_refused(tmp_path: Path) -> None:
    files = model(tmp_path / "gone")
    files.tokenizer_path.unlink()
    assert "cannot be read: No such file" in refused(files)


HANGS = """
import os, sys
sys.path.insert(0, {root!r})
import app.text.tokenizer_probe as it, app.runners.parent_watch as line

def probe_tokenizer(_):
    open({told!r}, "w").write(f"{{os.getpid()}}\\n")
    os.read(os.pipe()[0], 1)

it.probe_tokenizer = probe_tokenizer
line.tie_to_parent = lambda: None
"""

ASKS = """
import asyncio, sys
from app import store
from app.runners.tokenizer_check import TokenizerChecker
asyncio.run(TokenizerChecker(lambda _: False).check(store.find(sys.argv[1])))
"""


def test_no_process_is_left_behind_by_an_asker_that_was_killed(
    tiny_model: Path, tmp_path: Path, plant: Callable[[str], None]
) -> None:
    told = tmp_path / "pid"
    plant(HANGS.format(told=str(told), root=str(ROOT)))
    with subprocess.Popen([sys.executable, "-c", ASKS, str(tiny_model)], cwd=ROOT) as asker:
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"))
        process = int(told.read_text())
        assert lives(process)
        asker.kill()
    wait_until(lambda: not lives(process))


WATCHED = """
import resource, time
from app.runners.tokenizer_check_main import watch_memory
held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
watch_memory(held + (100 << 20))
more = b"x" * (held + (200 << 20))
time.sleep(60)
"""


@linux
def test_memory_is_also_limited_where_the_system_does_not() -> None:
    """As on macOS. Linux counts in units of 1024 bytes."""
    done = subprocess.run([sys.executable, "-c", WATCHED], cwd=ROOT, timeout=60)
    assert done.returncode == 4
