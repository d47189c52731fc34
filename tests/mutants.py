"""`python -m tests.mutants`: small random faults in the product, for the tests to find.

`draw` prints the faults. `run` tries them, one after the other, in a clone of a commit, on one tier
of tests (tests/tiers.py) after the other:

    python -m tests.mutants run --tiers unit integration --before COMMIT

A tier first runs the tests that mirror the changed module, then those of its folder. The faults
that remain are applied together, and the whole tier runs. Each fault is then tried alone on the
tests that failed, and the faults that these find are removed, until the tier passes. With
`--before`, the faults that all tiers miss are tried in this way with the tests of an older commit.
A test counts only if it fails twice with the fault, and passes without. `table` writes
tests/mutants.md from the results, and keeps its notes.

Knows: syntax trees, git, pytest. Must not know: what the product does.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tests.tiers import TIERS

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("comparison", "operator", "index", "statement", "constant", "condition")

_OPERATOR = re.compile(r"\bnot\s+in\b|\bis\s+not\b|\b(?:in|is|and|or)\b|[<>=!]=|[<>+-]")
_PAIRS = {"<": "<=", ">": ">=", "==": "!=", "in": "not in", "is": "is not", "+": "-", "and": "or"}
_SWAPS = _PAIRS | {after: before for before, after in _PAIRS.items()}
_PARTS = (ast.UnaryOp, ast.Slice, ast.Tuple)
_SHOWN = (ast.expr, ast.keyword, ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_FAILURE = re.compile(r"(?:FAILED|ERROR) (\S+\.py(?:::[^\[\s]+(?:\[.*?\])?)?)(?: - .*)?")

# A test that takes longer hangs. Only the process of its worker ends, so the report has its name.
MAX_TEST_SECONDS = 300
MAX_FAILURES = 10

MAX_CODE = 90
HEADER = """\
# Mutants

Small faults in `app` and `models`, drawn by `python -m tests.mutants` with the seed {seed} from
commit {commit}. The tests of that commit find {caught} of them; one test of the first tier that
finds a fault is named. *Suite before*: whether the tests of an older commit{before} find one of the
others. *Note*: the test that finds the fault since, or why no test can.

| # | line | kind | fault | found by | suite before | note |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Mutant:
    """A fault. file: relative to the checkout. before: the code in the bytes start to end (not
    included), which `after` replaces."""

    number: int
    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int


@dataclass(frozen=True)
class Outcome:
    """The end of a pytest run. failed: IDs of tests, or the files that could not be imported."""

    status: int
    failed: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return self.status in (0, 5)  # 5: all tests are deselected


@dataclass(frozen=True)
class Trial:
    """Faults, and the copy where they are tried. results: as in the file that `save` writes."""

    copy: Path
    mutants: Sequence[Mutant]
    results: Any
    save: Callable[[], None]

    @property
    def left(self) -> list[Mutant]:
        return [x for x in self.mutants if str(x.number) not in self.results["caught"]]

    def record(self, mutant: Mutant, tier: str, test: str | None) -> None:
        print(f"{mutant.number:2} {mutant.file}:{mutant.line} {tier}: {test or 'missed'}")
        if test:
            found = {"tier": tier.partition(":")[0], "test": test}
            self.results["caught"][str(mutant.number)] = found


def find_sites(file: str, source: bytes) -> Iterator[Mutant]:
    """All possible faults of a module, with the number 0."""
    lines = [0, *(match.end() for match in re.finditer(rb"\n", source))]

    def span(node: Any) -> slice:
        start = lines[node.lineno - 1] + node.col_offset
        return slice(start, lines[node.end_lineno - 1] + node.end_col_offset)

    for node, parents in _walk(ast.parse(source)):
        for kind, whole, first, last in _find_parts(node, parents):
            # the part that changes: the node, or the operator between two nodes
            part = span(first) if first is last else slice(span(first).stop, span(last).start)
            old = source[part].decode()
            new = _replace(kind, old)
            if new != old:
                start, end = span(whole).start, span(whole).stop
                before = source[start:end].decode()
                after = source[start : part.start].decode() + new + source[part.stop : end].decode()
                line = 1 + source.count(b"\n", 0, part.start)
                yield Mutant(0, file, line, kind, before, after, start, end)


def _replace(kind: str, code: str) -> str:
    match kind:
        case "statement":
            return "pass"
        case "condition":
            return f"not ({code})"
        case "index" | "constant":
            return str(int(code, 0) + 1)
        case _:
            # a comment may contain anything
            swap = "#" not in code
            return _OPERATOR.sub(lambda x: _SWAPS[" ".join(x[0].split())], code) if swap else code


def _find_parts(
    node: ast.AST, parents: Sequence[ast.AST]
) -> Iterator[tuple[str, ast.AST, ast.AST, ast.AST]]:
    """(kind, the code that is shown, the first and the last node of what changes)."""
    match node:
        case ast.Compare(left=left, comparators=[right]):
            yield "comparison", node, left, right
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            # `-` between texts or lists would only be a TypeError
            if not _is_sequence(left) and not _is_sequence(right):
                yield "operator", node, left, right
        case ast.BoolOp(values=[left, right, *_]):
            yield "operator", node, left, right
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            owner = next(x for x in parents if not isinstance(x, _PARTS))
            if isinstance(owner, ast.Subscript):
                yield "index", owner, node, node
            elif any(isinstance(parent, _FUNCTIONS) for parent in parents):
                yield "constant", parents[0] if isinstance(parents[0], _SHOWN) else node, node, node
        case ast.If(test=test):
            yield "condition", test, test, test
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield "statement", node, node, node
        case ast.Assign(targets=[ast.Attribute()], value=value):
            # a parameter that a constructor keeps: without it, each use fails
            if not (isinstance(value, ast.Name) and getattr(parents[0], "name", "") == "__init__"):
                yield "statement", node, node, node


def _walk(
    node: ast.AST, parents: Sequence[ast.AST] = ()
) -> Iterator[tuple[ast.AST, Sequence[ast.AST]]]:
    """The code that runs, with its parents, the nearest first: no annotations, protocols,
    decorators, assertions, log calls, and no f-strings (Python 3.11 has wrong positions there)."""
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    match node:
        case ast.Assert() | ast.JoinedStr():
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            return
        case ast.If(test=test) if re.search("TYPE_CHECKING|__name__", ast.unparse(test)):
            return
        case ast.Subscript(value=ast.Name(id="Literal" | "Annotated")):
            return
        case ast.ClassDef(bases=bases, body=body):
            children = [] if any("Protocol" in ast.unparse(base) for base in bases) else body
        case (
            ast.FunctionDef(args=arguments, body=body)
            | ast.AsyncFunctionDef(args=arguments, body=body)
        ):
            children = [arguments, *body]
        case ast.arguments(defaults=defaults, kw_defaults=others):
            children = [*defaults, *filter(None, others)]
        case ast.AnnAssign(target=target, value=value):
            children = [target, value] if value else []
    yield node, parents
    for child in children:
        yield from _walk(child, (node, *parents))


def _is_sequence(node: ast.expr) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def apply(source: bytes, mutant: Mutant) -> bytes:
    assert source[mutant.start : mutant.end] == mutant.before.encode(), mutant
    return source[: mutant.start] + mutant.after.encode() + source[mutant.end :]


def draw(seed: int, count: int, root: Path) -> list[Mutant]:
    """Draws faults in the checkout: of each kind in turn, one of all places in files that have none
    yet. The same for the same sources."""
    paths = sorted(path for name in ("app", "models") for path in (root / name).rglob("*.py"))
    sources = {str(x.relative_to(root)): x.read_bytes() for x in paths if "training" not in x.parts}
    sites = [site for file, source in sources.items() for site in find_sites(file, source)]
    chance = random.Random(seed)
    chosen: list[Mutant] = []
    while len(chosen) < count:
        kind, used = KINDS[len(chosen) % len(KINDS)], {mutant.file for mutant in chosen}
        site = chance.choice([x for x in sites if x.kind == kind and x.file not in used])
        sites.remove(site)
        with contextlib.suppress(SyntaxError):
            compile(apply(sources[site.file], site), site.file, "exec")
            chosen.append(replace(site, number=len(chosen) + 1))
    return chosen


def git(place: Path, *arguments: str | Path) -> str:
    return subprocess.check_output(["git", "-C", place, *arguments], text=True).strip()


def make_copy(folder: Path, name: str, commit: str) -> Path:
    """A clone of this checkout at the commit, with the compiled kernels and everything else that
    is not in the repository, except .venv: no test may write to it."""
    copy = folder / name
    if not copy.exists():
        git(ROOT, "clone", "--quiet", "--no-checkout", ROOT, copy)
    git(copy, "fetch", "--quiet")
    git(copy, "checkout", "--quiet", "--force", "--detach", commit)
    for built in (ROOT / "models/kernels").glob("*.so"):
        shutil.copy2(built, copy / "models/kernels")
    ignored = [
        ".venv-agents",
        ".venv-anthropic0",
        ".venv-clients",
        "examples/node/node_modules",
    ]
    (copy / ".git/info/exclude").write_text("".join(f"/{name}\n" for name in ignored))
    links = {copy / name: ROOT / name for name in ignored}
    for link, target in {**links, folder / "shared": ROOT.parent / "shared"}.items():
        if target.exists() and not link.is_symlink():
            link.symlink_to(target)
    command = [sys.executable, "-c", "import app, models; print(app.__file__, models.__file__)"]
    for place in (copy, folder):
        found = subprocess.check_output(command, cwd=place, env=_environ(copy), text=True)
        assert found.split() == [f"{copy}/app/__init__.py", f"{copy}/models/__init__.py"], found
    return copy


def _environ(copy: Path) -> dict[str, str]:
    """Child processes also import the copy, and not the installed package."""
    dropped = ("PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": str(copy), "COLUMNS": "1000"}


@contextlib.contextmanager
def applied(copy: Path, mutants: Sequence[Mutant]) -> Iterator[None]:
    sources = {mutant: (copy / mutant.file).read_bytes() for mutant in mutants}
    try:
        for mutant, source in sources.items():
            _write(copy / mutant.file, apply(source, mutant))
        yield
    finally:
        for mutant, source in sources.items():
            _write(copy / mutant.file, source)


def _write(path: Path, source: bytes) -> None:
    """Also removes the bytecode, which may have the same time and size."""
    path.write_bytes(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def run_tests(
    copy: Path, arguments: Sequence[str], limit: float = 3600, skipped: Iterable[str] = ()
) -> Outcome:
    """Runs pytest in the copy, with its output in log.txt next to the copy. Above the limit in
    seconds, the run is killed."""
    command = [
        *("timeout", "--signal=KILL", f"{limit:.0f}", "nice", "-n", "10"),
        *(sys.executable, "-m", "pytest", "--quiet", "--no-header", "-rfE"),
        *("-p", "no:cacheprovider", "-o", f"faulthandler_timeout={MAX_TEST_SECONDS}"),
        *("-o", "faulthandler_exit_on_timeout=true", *arguments),
        *(f"--deselect={test}" for test in skipped),
    ]
    started = time.monotonic()
    log = copy.parent / "log.txt"
    with log.open("wb") as out:
        ended = subprocess.run(command, cwd=copy, env=_environ(copy), stdout=out, stderr=out)
    summary = log.read_text("utf-8", "replace").rpartition("short test summary info")[2]
    failed = [match[1] for line in summary.splitlines() if (match := _FAILURE.fullmatch(line))]
    return Outcome(ended.returncode, tuple(dict.fromkeys(failed)), time.monotonic() - started)


def find_selections(copy: Path, file: str) -> list[list[str]]:
    """The test files that mirror the module, and the folder of tests. app/text/prompt.py is tested
    by tests/text/test_prompt*.py and tests/text."""
    path = PurePosixPath(file.removeprefix("app/"))
    folder = copy / "tests" / path.parent
    while not folder.is_dir():
        folder = folder.parent
    tests = sorted(folder.glob(f"test_{path.stem.strip('_')}*.py"))
    selections = [[str(test.relative_to(copy)) for test in tests]] if tests else []
    if folder != copy / "tests":
        selections.append([str(folder.relative_to(copy))])
    return selections


def confirm(copy: Path, mutant: Mutant, tests: Sequence[str]) -> str | None:
    """The first of the tests that fails with the fault and passes without."""
    with applied(copy, [mutant]):
        failed = run_tests(copy, [*tests, "-n", "1"]).failed
    clean = run_tests(copy, [*failed, "-n", "1"]).failed if failed else ()
    return next((test for test in failed if test not in clean), None)


def find_catch(
    copy: Path, mutant: Mutant, arguments: Sequence[str], clean: Mapping[str, Any]
) -> str | None:
    """The test that finds the fault, or how pytest ended without a report of a test. clean: the
    outcome without the fault."""
    skipped = list(clean["failed"])
    while True:
        with applied(copy, [mutant]):
            limit = 120 + 4 * clean["seconds"]
            outcome = run_tests(copy, [*arguments, "-x"], limit, skipped)
        if outcome.passed:
            return None
        if not outcome.failed:
            killed = outcome.status in (-signal.SIGKILL, 128 + signal.SIGKILL)
            return f"{arguments[0]} ({'time limit' if killed else f'status {outcome.status}'})"
        if found := confirm(copy, mutant, outcome.failed):
            return found
        skipped += outcome.failed


def run_near(trial: Trial, tier: str, options: Sequence[str]) -> None:
    """Tries each fault alone, on the tests of its module and then of its folder."""
    clean = trial.results["clean"]
    for mutant in trial.left:
        tried = trial.results["tried"].setdefault(str(mutant.number), [])
        for selection in find_selections(trial.copy, mutant.file):
            key = f"{tier}: {' '.join(selection)}"
            if key in tried or mutant not in trial.left:
                continue
            workers = "1" if selection[0].endswith(".py") else "2"
            arguments = [*selection, *options, "-n", workers]
            if key not in clean:
                outcome = run_tests(trial.copy, arguments)
                assert outcome.passed or outcome.failed, f"{key}: {outcome}"
                clean[key] = asdict(outcome)
                trial.save()
            trial.record(mutant, key, find_catch(trial.copy, mutant, arguments, clean[key]))
            tried.append(key)
            trial.save()


def run_joint(trial: Trial, tier: str, options: Sequence[str], how: argparse.Namespace) -> None:
    """Applies all faults that are left, and runs the tests of the tier, until they pass. After
    each run, removes the faults that were found, or else the tests that fail only sometimes.
    how: the command line."""
    state = trial.results["joint"].setdefault(tier, {"skipped": [], "passed": False})
    arguments = [*how.tests, *options, f"--maxfail={MAX_FAILURES}", "-n", how.workers]
    while trial.left and not state["passed"]:
        with applied(trial.copy, trial.left):
            outcome = run_tests(trial.copy, arguments, how.limit, state["skipped"])
        print(f"{tier}, {len(trial.left)} faults together: {outcome}")
        state["passed"] = outcome.passed
        if not outcome.passed:
            if not outcome.failed:
                raise SystemExit(f"pytest reports no test: {trial.copy.parent}/log.txt")
            found = {x: confirm(trial.copy, x, outcome.failed) for x in trial.left}
            for mutant, test in found.items():
                trial.record(mutant, tier, test)
            if not any(found.values()):
                state["skipped"] += outcome.failed
        trial.save()


def run_before(trial: Trial, how: argparse.Namespace) -> None:
    """Tries the faults that no tier has found with the tests of an older commit."""
    commits = [trial.results["commit"], git(ROOT, "rev-parse", how.before)]
    changed = git(ROOT, "diff", "--name-only", *commits, "--", "app", "models").splitlines()
    print(f"files in app and models that differ between the commits: {changed or 'none'}")
    mutants = [mutant for mutant in trial.left if mutant.file not in changed]
    before = trial.results.setdefault("before", {"caught": {}, "joint": {}})
    before |= {"commit": commits[1], "tried": [mutant.number for mutant in mutants]}
    copy = make_copy(how.folder, "before", commits[1])
    run_joint(Trial(copy, mutants, before, trial.save), "before", shlex.split(how.options), how)


def run(how: argparse.Namespace) -> None:
    """Continues the run whose results are in the file, or starts one."""
    results: Any = {"seed": how.seed, "tried": {}, "clean": {}, "caught": {}, "joint": {}}
    if how.results.exists():
        results = json.loads(how.results.read_text("utf-8"))
    commit = results.setdefault("commit", git(ROOT, "rev-parse", how.commit))
    copy = make_copy(how.folder, "copy", commit)
    mutants = draw(results["seed"], how.count, copy)
    drawn = [asdict(mutant) for mutant in mutants]
    assert results.setdefault("mutants", drawn) == drawn, "give another file for these mutants"

    def save() -> None:
        partial = how.results.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1), "utf-8")
        partial.replace(how.results)

    trial = Trial(copy, mutants, results, save)
    for tier in how.tiers:
        options = [f"--tier={tier}"]
        run_near(trial, tier, options)
        if not how.near_only:
            run_joint(trial, tier, options, how)
    if how.before:
        run_before(trial, how)
    print("\n".join(f"missed: {describe(mutant)}" for mutant in trial.left))


def describe(mutant: Mutant) -> str:
    change = f"{quote(mutant.before)} → {quote(mutant.after)}"
    return f"{mutant.number} | {mutant.file}:{mutant.line} | {mutant.kind} | {change}"


def quote(code: str) -> str:
    """A code span of Markdown: one line, not too long."""
    line = " ".join(code.split())
    line = line if len(line) <= MAX_CODE else f"{line[:MAX_CODE]}…"
    marks = "``" if "`" in line else "`"
    return f"{marks}{line}{marks}".replace("|", r"\|")


def format_table(results: Any, notes: Mapping[str, str]) -> str:
    """notes: by the number of the fault."""
    before = results.get("before", {"tried": [], "caught": {}})
    rows: list[str] = []
    for mutant in (Mutant(**values) for values in results["mutants"]):
        number = str(mutant.number)
        caught, earlier = results["caught"].get(number), before["caught"].get(number)
        by = f"{caught['tier']}: {quote(caught['test'])}" if caught else "**missed**"
        missed = "missed" if mutant.number in before["tried"] else ""
        then = quote(earlier["test"]) if earlier else missed
        rows.append(f"| {describe(mutant)} | {by} | {then} | {notes.get(number, '')} |\n")
    commit = f" ({before['commit'][:7]})" if "commit" in before else ""
    shown = {"seed": results["seed"], "commit": results["commit"][:7], "before": commit}
    return HEADER.format(caught=len(results["caught"]), **shown) + "".join(rows)


def read_notes(table: str) -> dict[str, str]:
    """The last cells of a table. No other cell has ` | `."""
    rows = [line.strip().strip("|").split(" | ") for line in table.splitlines()]
    return {row[0].strip(): row[-1].strip() for row in rows if len(row) == 7}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    build = ROOT / "build/mutants"
    parser.add_argument("command", choices=("draw", "run", "table"))
    parser.add_argument("--seed", type=int, default=36)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=build, help="for the copies")
    parser.add_argument("--results", type=Path, default=build / "results.json")
    parser.add_argument("--table", type=Path, default=ROOT / "tests/mutants.md")
    parser.add_argument("--commit", default="HEAD", help="whose faults and tests are tried")
    parser.add_argument("--tiers", nargs="+", default=["unit", "integration"], choices=TIERS)
    parser.add_argument("--near-only", action="store_true", help="do not run whole tiers")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="of a whole tier")
    parser.add_argument("--workers", default="3", help="for a whole tier")
    parser.add_argument("--limit", type=float, default=7200, help="seconds for a whole tier")
    parser.add_argument("--before", metavar="COMMIT", help="whose tests try the missed faults")
    parser.add_argument("--options", default="--slow=without", help="of pytest, for --before")
    how = parser.parse_args()
    how.folder = how.folder.resolve()
    how.folder.mkdir(parents=True, exist_ok=True)
    if how.command == "draw":
        print("\n".join(map(describe, draw(how.seed, how.count, ROOT))))
    elif how.command == "run":
        run(how)
    else:
        notes = read_notes(how.table.read_text("utf-8")) if how.table.exists() else {}
        how.table.write_text(format_table(json.loads(how.results.read_text()), notes), "utf-8")


if __name__ == "__main__":
    main()
