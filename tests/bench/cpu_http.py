"""Compare servers: ours, llama-cpp-python's, mlx-lm's as installed and with a BLAS.

Knows: how to start each server, the measurements of a client. Must not know: the kernels. 110M, f32
and q4; 1 and 8 clients with new prompts. All servers run, and the measurements alternate.
"""

import asyncio
import contextlib
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.bench import client, cpu_plot
from tests.bench.cpu_backends import ROOT, make_environment
from tests.bench.server_pair import find_free_port
from tests.bench.streams import Body, Stream, run_all
from tests.server_process import run_server

SIZE, FORMATS, CLIENTS = "110M", ("f32", "q4"), (1, 8)
PROMPT, ANSWER = 64, 64
PLOT = Path("docs/cpu-http.svg")
READY = 120.0
# a server that takes longer than this for a turn is not measured again
PATIENCE = 30.0
BLAS = "BLAS"
PRELOADABLE = "/usr/lib/*-linux-gnu/openblas*/libopenblas.so.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """model: its name in requests."""

    name: str
    port: int
    model: str


@dataclass(slots=True)
class HttpTimings:
    """Tokens per second of all clients, from the first request to the last token; seconds to the
    first token of each client."""

    rates: list[float] = field(default_factory=list[float])
    ttfts: list[float] = field(default_factory=list[float])


# by format, clients, server
HttpResults = Mapping[tuple[str, int, str], HttpTimings]


def report(threads: int, rounds: int, llama: str | None, plot: Path | None) -> str:
    """The table of results. plot: a file for a chart. llama: the Python that has llama.cpp."""
    found: dict[tuple[str, int, str], HttpTimings] = {}
    for form in FORMATS:
        with contextlib.ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers = [
                stack.enter_context(server)
                for server in _start_servers(place, form, threads, llama)
            ]
            for (clients, name), timings in asyncio.run(_measure(servers, rounds)).items():
                found[form, clients, name] = timings
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_text(draw_chart(found))
    summary = (
        f"{SIZE}, {threads} threads; {PROMPT} prompt and {ANSWER} answer tokens a client. Median "
        "(range). llama-cpp-python's server handles one request at a time."
    )
    return "\n".join(["", "### Through HTTP", "", summary, "", *format_table(found)])


def format_table(found: HttpResults) -> list[str]:
    lines = [
        "| format | clients | server | tokens/s | ours / theirs | first token, s |",
        "|---|---|---|---|---|---|",
    ]
    for (form, clients, name), timings in found.items():
        mine = found.get((form, clients, "mlxrunner"))
        ratio = ""
        if mine is not None and name != "mlxrunner":
            pairs = zip(mine.rates, timings.rates, strict=False)
            ratio = f"**{statistics.median(a / b for a, b in pairs):.3g}**"
        rates, ttfts = client.format_spread(timings.rates), client.format_spread(timings.ttfts)
        lines.append(f"| {form} | {clients} | {name} | {rates} | {ratio} | {ttfts} |")
    return lines


def draw_chart(found: HttpResults) -> str:
    panels: list[cpu_plot.Panel] = []
    for form, clients in dict.fromkeys((form, clients) for form, clients, _ in found):
        values = {
            name: statistics.median(timings.rates)
            for (other, count, name), timings in found.items()
            if (other, count) == (form, clients)
        }
        many = "1 client" if clients == 1 else f"{clients} clients"
        panels.append(cpu_plot.Panel(title=f"{form}, {many}", values=values))
    return cpu_plot.draw_bars(f"{SIZE} on a CPU through HTTP, tokens/s", panels)


async def _measure(
    servers: Sequence[HttpServer], rounds: int
) -> dict[tuple[int, str], HttpTimings]:
    found: dict[tuple[int, str], HttpTimings] = {}
    slow: set[tuple[int, str]] = set()
    for server in servers:
        # the first request loads and allocates
        await _run_streams(server, 1, answer=4, seed=-1)
    for turn, clients, server in itertools.product(range(rounds), CLIENTS, servers):
        if (clients, server.name) in slow:
            continue
        begun = time.perf_counter()
        streams = await _run_streams(server, clients, answer=ANSWER, seed=100 * turn + 10 * clients)
        end = max(stream.arrivals[-1] for stream in streams)
        rate = clients * ANSWER / (end - min(stream.sent for stream in streams))
        timings = found.setdefault((clients, server.name), HttpTimings())
        timings.rates.append(rate)
        timings.ttfts += [stream.ttft for stream in streams]
        if time.perf_counter() - begun > PATIENCE:
            slow.add((clients, server.name))
        print(f"{server.name}, {clients} clients, turn {turn}: {rate:.4g}", file=sys.stderr)
    return found


async def _run_streams(server: HttpServer, clients: int, *, answer: int, seed: int) -> list[Stream]:
    streams: list[Stream] = []
    for row in range(clients):
        # no spaces, which tokenizers treat differently
        prompt = client.make_prompt(PROMPT, seed=seed + row).replace(" ", "q")
        body: Body = {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": answer,
            "temperature": 0,
        }
        streams.append(Stream(server.port, body))
    await run_all(streams)
    return streams


def _start_servers(
    place: Path, form: str, threads: int, llama: str | None
) -> Iterator[contextlib.AbstractContextManager[HttpServer]]:
    folder = place / SIZE
    _run([sys.executable, "-m", "tests.bench.cpu_models", str(folder), SIZE, form, "served"])
    yield _run_ours(folder, threads)
    if llama is not None:
        gguf = place / f"{SIZE}.gguf"
        _run([llama, "-m", "tests.bench.cpu_gguf", str(gguf), SIZE, form])
        yield _run_llama_cpp(llama, gguf, threads)
    python = os.environ.get("MLX_LM", sys.executable)
    if python != sys.executable or importlib.util.find_spec("mlx_lm"):
        yield _run_mlx_lm("mlx-lm", python, folder, {})
        if (blas := _find_blas()) is not None:
            variables = {"LD_PRELOAD": blas, "OPENBLAS_NUM_THREADS": str(threads)}
            yield _run_mlx_lm("mlx-lm, OpenBLAS preloaded", python, folder, variables)


@contextlib.contextmanager
def _run_ours(folder: Path, threads: int) -> Iterator[HttpServer]:
    variables = {"MLXRUNNER_THREADS": str(threads)}
    with run_server(str(folder), "--parallel", str(max(CLIENTS)), environ=variables) as server:
        yield HttpServer(name="mlxrunner", port=server.port, model=folder.name)


@contextlib.contextmanager
def _run_llama_cpp(python: str, gguf: Path, threads: int) -> Iterator[HttpServer]:
    """By default, the server would abort an answer when the next request arrives."""
    port = find_free_port()
    command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--port", str(port)]
    command += ["--n_ctx", "1024", "--interrupt_requests", "False", "--verbose", "False"]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
    with _run_command(command, {}, f"http://127.0.0.1:{port}/v1/models"):
        # it sends no usage, but the finish reason is the length
        yield HttpServer(name="llama-cpp-python", port=port, model=str(gguf))


@contextlib.contextmanager
def _run_mlx_lm(
    name: str, python: str, folder: Path, variables: Mapping[str, str]
) -> Iterator[HttpServer]:
    port = find_free_port()
    command = [python, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]
    with _run_command(
        command, {"HF_HUB_OFFLINE": "1", **variables}, f"http://127.0.0.1:{port}/health"
    ):
        yield HttpServer(name=name, port=port, model=str(folder))


@contextlib.contextmanager
def _run_command(command: Sequence[str], variables: Mapping[str, str], url: str) -> Iterator[None]:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=make_environment(variables), stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + READY
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{' '.join(command)} does not serve:\n{log.read()[-2000:]}")
                time.sleep(0.1)
            yield
        finally:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == httpx.codes.OK
    return False


def _find_blas() -> str | None:
    """The library that BLAS names, or the system's OpenBLAS."""
    named = os.environ.get(BLAS)
    found = [named] if named else [str(path) for path in sorted(Path("/").glob(PRELOADABLE[1:]))]
    return found[0] if found else None


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, env=make_environment({}), check=True)
