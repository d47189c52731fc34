"""`make test-durations`: measures the cost of each test function, rewrites tests/integration.txt.

Knows: the files of tests/plugins.py, the list. Must not know: what the tests are about. It needs
only the standard library.

`make test` runs every test function that costs less than LIMIT CPU seconds and starts no process.
The others are listed in tests/integration.txt, from which conftest.py assigns the marker
`integration`. The list is the result of a measurement, and is never edited by hand.

A function costs what all its cases cost together, and in addition what its fixtures of a wider
scope cost once. It starts a process if a case or one of these fixtures does.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests/integration.txt"

# CPU seconds of a function in `make test`. One that is in the list stays there until it costs less
# than the second number, so that a measurement on another machine changes few lines.
LIMIT, LOWER_LIMIT = 1.0, 0.7

HEADER = """\
# The test functions that `make test` leaves out: those that start a process, or take a second of
# CPU time or more. `make test-durations` rewrites this file; do not edit it.
"""


@dataclass
class Cost:
    """cpu: seconds. process: whether a process was started."""

    cpu: float = 0.0
    process: bool = False

    def add(self, other: "Cost") -> None:
        self.cpu += other.cpu
        self.process |= other.process


@dataclass
class Measurement:
    """The costs of a run. functions: by the ID of the function. fixtures: by the ID of the place
    that defines it and its name, of a wider scope than a function. used: the fixtures of each
    function."""

    functions: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    fixtures: dict[str, Cost] = field(default_factory=dict)
    used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def find_function(test: str) -> str:
    """The ID of the test's function: the part before the parameters."""
    return test.partition("[")[0]


def read_measurement(files: Iterable[Path]) -> Measurement:
    """files: of all workers of a run."""
    result = Measurement()
    for file in files:
        for text in file.read_text("utf-8").splitlines():
            line = json.loads(text)
            cost = Cost(line["cpu"], line["process"])
            if name := line.get("fixture"):
                # each worker sets up its own; the most expensive one counts
                known = result.fixtures.get(name, Cost())
                result.fixtures[name] = Cost(
                    max(known.cpu, cost.cpu),
                    known.process or cost.process,
                )
            else:
                function = find_function(line["test"])
                result.functions[function].add(cost)
                result.used[function].update(line["used"])
    return result


def compute_costs(measurement: Measurement) -> dict[str, Cost]:
    """The cost of each function, with its wider fixtures."""
    costs: dict[str, Cost] = {}
    for function, own in measurement.functions.items():
        total = Cost(own.cpu, own.process)
        for name in measurement.used[function]:
            total.add(measurement.fixtures.get(name, Cost()))
        costs[function] = total
    return costs


def read_list(path: Path = LIST) -> dict[str, str]:
    """The listed functions, with the reason: "process" or "time"."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    return {function: reason for reason, _, function in (line.partition("  ") for line in lines)}


def choose_integration(costs: Mapping[str, Cost], listed: Mapping[str, str]) -> dict[str, str]:
    """The new list. A listed function that did not run stays, if it still exists."""
    chosen = {
        function: reason
        for function, reason in listed.items()
        if function not in costs and exists(function)
    }
    for function, cost in costs.items():
        limit = LOWER_LIMIT if listed.get(function) == "time" else LIMIT
        if cost.process:
            chosen[function] = "process"
        elif cost.cpu >= limit:
            chosen[function] = "time"
    return chosen


def exists(function: str) -> bool:
    """Whether the file defines the function, or imports everything from a module that does. A state
    machine of hypothesis has the function runTest of a class that is assigned."""
    path, _, name = function.partition("::")
    file = ROOT / path
    if not file.exists():
        return False
    text = file.read_text("utf-8")
    owner, _, last = name.rpartition("::")
    if last == "runTest":
        return f"\n{owner} = " in text
    modules = re.findall(r"^from (tests[\w.]*) import \*", text, re.MULTILINE)
    files = [ROOT / f"{module.replace('.', '/')}.py" for module in modules]
    return any(
        f"def {last}(" in source for source in (text, *(f.read_text("utf-8") for f in files))
    )


def format_list(chosen: Mapping[str, str]) -> str:
    lines = [f"{chosen[function]}  {function}" for function in sorted(chosen)]
    return HEADER + "".join(line + "\n" for line in lines)


def find_unlisted(folder: Path, listed: Mapping[str, str]) -> list[str]:
    """The functions of a run with `--costs=folder` that belong into the list and are not there."""
    chosen = choose_integration(compute_costs(read_measurement(folder.glob("*.jsonl"))), listed)
    return sorted(chosen.keys() - listed.keys())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-durations", description=__doc__)
    parser.add_argument(
        "--from", dest="folder", type=Path, help="costs that were measured before, by --costs"
    )
    options = parser.parse_args(arguments)
    folder: Path = options.folder or ROOT / "build/costs"
    status = 0
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pytest", "tests", "-n", "auto", "--maxprocesses", "4"]
        status = subprocess.call([*command, "-q", f"--costs={folder}"], cwd=ROOT)
    costs = compute_costs(read_measurement(folder.glob("*.jsonl")))
    listed = read_list()
    chosen = choose_integration(costs, listed)
    LIST.write_text(format_list(chosen), "utf-8")
    rest = sum(cost.cpu for function, cost in costs.items() if function not in chosen)
    print(f"{len(chosen)} functions in {LIST.relative_to(ROOT)}, {rest:.0f} CPU seconds in others")
    for function in sorted(chosen.keys() - listed.keys()):
        print(f"added    {costs[function].cpu:6.1f} s  {function}")
    for function in sorted(listed.keys() - chosen.keys()):
        cost = costs.get(function)
        print(f"removed  {'deleted' if cost is None else f'{cost.cpu:6.1f} s'}  {function}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
