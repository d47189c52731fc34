"""Profile of one step: `make bench-cpu ARGS="profile --size 110M --format q4"`.

Knows: processes, perf. Must not know: MLX. Two views of the same step, neither of which is
complete: times by module (cpu_breakdown.py), and CPU samples by thread, library and function if
`perf` is installed.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.cpu_backends import ROOT, make_environment

SECONDS, SHOWN = 4.0, 16


def report(size: str, form: str, streams: int, threads: int) -> str:
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place) / size)
        variables = make_environment({"MLXRUNNER_THREADS": str(threads)})
        python = [sys.executable, "-m"]
        write = [*python, "benchmarks.cpu_models", folder, size, form]
        subprocess.run(write, cwd=ROOT, env=make_environment({}), check=True)
        profile = [*python, "benchmarks.cpu_worker", "profile", folder, str(streams)]
        profiled = subprocess.run(
            profile, cwd=ROOT, env=variables, check=True, stdout=subprocess.PIPE, text=True
        )
        lines = [f"{size} {form}, {streams or 'no'} streams, {threads} thread(s)", profiled.stdout]
        step = [*python, "benchmarks.cpu_worker", "step", folder, str(streams), str(SECONDS)]
        lines += _sample_with_perf(step, variables, Path(place) / "perf.data")
    return "\n".join(lines)


def _sample_with_perf(command: list[str], variables: dict[str, str], data: Path) -> list[str]:
    perf = shutil.which("perf")
    if perf is None:
        return ["no samples: perf is not installed"]
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pid = json.loads(process.stdout.readline())["pid"]
        record = [perf, "record", "-q", "-F", "499", "-p", str(pid), "-o", str(data)]
        recording = subprocess.Popen(record, stderr=subprocess.DEVNULL)
        process.communicate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            recording.wait(5)
        if recording.poll() is None:
            recording.send_signal(signal.SIGINT)
            recording.wait()
    finally:
        process.kill()
        process.wait()
    if not data.exists():
        return ["no samples: perf is not permitted to attach to processes"]
    lines: list[str] = []
    for title, keys in (("thread", "pid"), ("library", "dso"), ("function", "dso,sym")):
        command = [perf, "report", "-i", str(data), "--stdio", "-g", "none", "-s", keys]
        printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        rows = [line.rstrip() for line in printed.splitlines() if line and line[0] != "#"]
        lines += ["", f"samples by {title}:", *rows[:SHOWN]]
    return lines
