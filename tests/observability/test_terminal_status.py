"""The banner, and the status line: loads and long prefills."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from app.core.events import PrefillProgress, TextDelta
from app.core.jobs import ComputeBackend, EngineStats, Ledger
from app.core.models import ModelState
from app.core.requests import GenerateRequest
from app.core.terminal import OutputTerminal
from app.observability.terminal_status import BannerAddress, TerminalStatus, render_banner

TERMINAL = OutputTerminal(is_terminal=True, can_rewrite=True)
ADDRESS = BannerAddress(url="http://h:1", needs_key=False)

READY = ModelState(
    name="builtin",
    phase="ready",
    progress=100,
    stats=EngineStats(
        ledger=Ledger(budget=5 << 30, weights=1 << 30, prefix_limit=1 << 30),
        allocated_bytes=2 << 30,
    ),
    context_length=2048,
    parallel=1,
    backend=ComputeBackend(device="cpu", kernels="avx2", blas="OpenBLAS", threads=2),
)
LOADING = ModelState(name="qwen3:4b", phase="loading", progress=40)


class Screen:
    """The output of a status. now: the time of its clock."""

    def __init__(self, terminal: OutputTerminal = TERMINAL) -> None:
        self.statuses: list[str] = []
        self.now = 0.0
        self.status = TerminalStatus(
            self.statuses.append, lambda _: None, terminal, lambda: self.now
        )

    def render(self, states: Sequence[ModelState] = ()) -> str:
        self.status._update(states)
        return self.statuses[-1] if self.statuses else ""


def request(model: str) -> GenerateRequest:
    return GenerateRequest(model=model, prompt="hello")


def progress(done: int, total: int = 1000, prompt: int = 0) -> PrefillProgress:
    return PrefillProgress(prompt_index=prompt, computed_tokens=done, total_tokens=total)


def test_the_banner_tells_where_what_and_what_next() -> None:
    lines = render_banner([READY], ADDRESS, TERMINAL).splitlines()
    rows = [line.split(maxsplit=1) for line in lines if line]
    assert rows[0][0] == "mlxrunner"
    assert dict(rows[1:]) == {
        "address": "http://h:1",
        "model": "builtin, context 2048 tokens, 1 slot",
        "memory": "2.00 GiB used of 5.00 GiB, cached prefixes up to 1.00 GiB (25 %)",
        "device": "CPU, avx2 kernels, OpenBLAS, 2 threads",
        "try": "http://h:1/ in a browser",
        "mlxrunner": "run builtin",
        "curl": "http://h:1/v1/chat/completions -H 'Content-Type: application/json' -d "
        '\'{"model": "builtin", "messages": [{"role": "user", "content": "Hello"}]}\'',
    }


def test_the_banner_has_the_page_the_chat_and_the_key_where_there_is_one() -> None:
    address = replace(ADDRESS, needs_key=True)
    lines = [line.strip() for line in render_banner([READY], address, TERMINAL).splitlines()]
    assert any(line.startswith("try") and "http://h:1/ in a browser" in line for line in lines)
    assert "mlxrunner run builtin" in lines
    assert any('-H "Authorization: Bearer $MLXRUNNER_API_KEY"' in line for line in lines)


def test_other_models_are_counted_and_the_loaded_one_is_described() -> None:
    states = [replace(LOADING, phase="unloaded"), READY]
    assert "builtin, context 2048 tokens, 1 slot; 1 more can be requested" in render_banner(
        states, ADDRESS, TERMINAL
    )


def test_a_name_cannot_control_the_terminal_or_the_shell() -> None:
    text = render_banner([replace(READY, name="a\x1b[2J'; rm x")], ADDRESS, TERMINAL)
    assert "\x1b" not in text
    assert """'"'"'""" in text


def test_a_load_shows_its_progress_until_it_ends() -> None:
    screen = Screen()
    assert screen.render([READY, LOADING]) == "loading qwen3:4b [########............] 40 %"
    assert screen.render([READY]) == ""


def test_only_a_change_is_written() -> None:
    screen = Screen()
    screen.render([LOADING])
    screen.render([LOADING])
    assert len(screen.statuses) == 1


def test_a_long_prefill_shows_tokens_rate_and_the_time_left() -> None:
    screen = Screen()
    observer = screen.status.observe(request("m"))
    observer.on_event(progress(200))  # from the cache
    assert screen.render() == ""
    screen.now = 2.0
    observer.on_event(progress(600))
    assert screen.render() == (
        "prefill m [############........] 600/1000 tokens, 200 tok/s, 2 s left"
    )
    observer.on_event(progress(1000))
    assert screen.render() == ""


def test_of_several_prefills_the_longest_is_shown() -> None:
    screen = Screen()
    observers = [screen.status.observe(request(name)) for name in ("a", "b")]
    for observer, total in zip(observers, (100, 5000), strict=True):
        observer.on_event(progress(0, total))
    screen.now = 3.0
    assert screen.render() == "prefill b [....................] 0/5000 tokens, +1 more"
    observers[1].on_end(complete=False)
    assert screen.render().startswith("prefill a ")
    observers[0].on_event(TextDelta(text="output"))
    assert screen.render() == ""


def test_a_terminal_that_cannot_rewrite_a_line_has_no_status_line() -> None:
    screen = Screen(OutputTerminal(is_terminal=True))
    screen.render([LOADING])
    assert screen.statuses == []


def test_the_banner_is_written_once_when_the_models_are_loaded() -> None:
    states, shown, blocks = [LOADING], list[str](), list[str]()

    async def run() -> None:
        has_status, has_block = asyncio.Event(), asyncio.Event()

        def show(text: str) -> None:
            shown.append(text)
            has_status.set()

        def write(text: str) -> None:
            blocks.append(text)
            has_block.set()

        status = TerminalStatus(show, write, TERMINAL)
        async with status.run(lambda: states, lambda: states[0].phase == "ready", lambda: ADDRESS):
            await has_status.wait()
            assert blocks == []
            states[0] = READY
            await has_block.wait()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(blocks) == 1
    assert "builtin" in blocks[0]
    assert shown[-1] == ""
