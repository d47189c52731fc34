"""Fixtures for all tests, and the selection of cases that keeps the suite short."""

import gc
import importlib
import inspect
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from app.observability.logs import QueuedLogHandler
from tests import tiny
from tests.durations import find_function, read_list
from tests.machine_load import OtherPrograms
from tests.machine_lock import MachineLock, machine_lock_of_run
from tests.plugins import CostPlugin, ResultsPlugin
from tests.results import VOID
from tests.throttle import Throttle
from tests.tiers import TIERS, is_file_outside, is_outside
from tests.unchanged import find_unchanged

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
NO_SHARED_DATA = "needs ../shared/data (real tokenizers, templates, models), which is missing"

TIES = pytest.StashKey[list[int]]()
MACHINE_LOCK = pytest.StashKey[MachineLock]()
OTHER_PROGRAMS = pytest.StashKey[OtherPrograms]()
LISTED = pytest.StashKey[frozenset[str]]()
UNCHANGED = pytest.StashKey[frozenset[str]]()

# The share of the machine that other programs may use while a test compares clocks.
MAX_SHARE_OF_OTHERS = 0.2

# the same examples on every run, so that a failure can be reproduced
settings.register_profile("reproducible", derandomize=True, deadline=None, max_examples=50)
# for properties that take more than a second; the others, and `make test-all`, have all examples
settings.register_profile("integration", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("reproducible")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real tokenizers, templates and small trained models. Not part of the repository."""
    if not SHARED.is_dir():
        pytest.skip(NO_SHARED_DATA)
    return SHARED


@pytest.fixture(scope="session")
def ties(request: pytest.FixtureRequest) -> list[int]:
    """For tests that compare two runs: appends the number of near-ties in one comparison. The
    summary prints the sum, so that an increase is visible."""
    return request.config.stash[TIES]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier only")
    parser.addoption(
        "--skip-unchanged",
        action="store_true",
        help="leave out tests marked recorded if what they depend on has not changed",
    )
    parser.addoption(
        "--costs", type=Path, metavar="FOLDER", help="write what each test costs to files there"
    )
    parser.addoption(
        "--results", type=Path, metavar="FILE", help="write the results for tests/run_parts.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores SIGINT in background jobs (`make test &`), and every process that a test
    # starts would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if tier := config.getoption("--tier"):
        config.option.markexpr = TIERS[tier]
        if tier == "integration":
            settings.load_profile(tier)
    config.stash[UNCHANGED] = _find_unchanged(config)
    config.stash[LISTED] = frozenset(read_list())
    config.stash[TIES] = []
    config.stash[MACHINE_LOCK] = machine_lock_of_run()
    if folder := config.getoption("--costs"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(CostPlugin(folder / f"{worker}.jsonl"))
    if (file := config.getoption("--results")) and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(ResultsPlugin(file))
    if sys.dont_write_bytecode and config.pluginmanager.hasplugin("cacheprovider"):
        _write_bytecode(config.cache.mkdir("bytecode"))


def _find_unchanged(config: pytest.Config) -> frozenset[str]:
    """The files whose marked tests are left out. The controller of several workers finds them."""
    if not config.getoption("--skip-unchanged"):
        return frozenset()
    handed: dict[str, Any] | None = getattr(config, "workerinput", None)
    return find_unchanged() if handed is None else frozenset(handed["unchanged"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["unchanged"] = sorted(node.config.stash[UNCHANGED])


def _write_bytecode(folder: Path) -> None:
    """Writes bytecode to pytest's cache folder, if it must not be written next to the sources.
    Otherwise each worker, and each server that a test starts, would compile all modules again."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Removes the variable that makes every child process measure coverage (`patch` in
    pyproject.toml). pytest-cov measures the workers, and pauses for tests marked `no_cover`; the
    other measurement would not pause."""
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    """More workers than cores, because tests wait for clocks, files and processes: with two cores,
    `make test` took 142 s with two workers and 124 s with three. The command line may limit the
    number."""
    num_cores = yield
    more = {"integration": 2, "programs": 2}
    return num_cores + more.get(config.getoption("--tier") or "", 1)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Stops the first of pytest-cov's two measurements of a worker. It starts one as for the
    controller and then one as for a worker. Only the second pauses and reports."""
    measuring: Any = session.config.pluginmanager.getplugin("_cov")
    if hasattr(session.config, "workerinput") and getattr(measuring, "cov_controller", None):
        measuring.cov_controller.cov.stop()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("timing"):
        item.stash[OTHER_PROGRAMS] = OtherPrograms()
    with item.config.stash[MACHINE_LOCK].shared():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Gives all tests that need ../shared/data the same location, so that the summary has one line
    for them. Reports a failed test that compares clocks as void if other programs used the
    machine: the test has then measured those programs."""
    report = yield
    if report.failed and (others := item.stash.get(OTHER_PROGRAMS, None)):
        share = others.compute_share()
        if share > MAX_SHARE_OF_OTHERS:
            path, line, _ = item.location
            cause = report.longreprtext.strip().rpartition("\n")[2]
            report.outcome = "skipped"
            report.longrepr = (
                path,
                line or 0,
                f"{VOID}other programs used {share:.0%} of the machine ({cause})",
            )
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if reason.endswith(NO_SHARED_DATA):
            report.longrepr = (__file__, 1, reason)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Of n workers, each imports another n-th of the test files first. Every worker collects all
    tests. Without bytecode, each would rewrite the assertions of all files, which takes longer than
    everything else that a collection does. In this order, it finds the bytecode that the others
    have written.

    Nothing is garbage during the collection, so searching for it would only take time."""
    config = session.config
    if config.pluginmanager.hasplugin("dsession"):
        return  # the controller collects nothing
    gc.disable()
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None:
        return
    first = int(worker["workerid"].removeprefix("gw"))
    for file in _list_test_files(config)[first :: worker["workercount"]]:
        name = ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
        # the collection imports it again, and reports its error or that it is skipped
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def _list_test_files(config: pytest.Config) -> Sequence[Path]:
    """The files that pytest will collect, in the same order in each worker."""
    files: set[Path] = set()
    for argument in config.args:
        path = (config.invocation_params.dir / argument.partition("::")[0]).resolve()
        files.update(_find_test_files(path) if path.is_dir() else [path])
    return sorted(
        file
        for file in files
        if not config.hook.pytest_ignore_collect(collection_path=file, config=config)
    )


def _find_test_files(folder: Path) -> Iterator[Path]:
    """Excludes those of programs that are installed below tests/, which are not packages."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(parent, name, "__init__.py").exists()]
        yield from (Path(parent, name) for name in names if fnmatch(name, "test_*.py"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import a file that has no test of the tier."""
    tier = config.getoption("--tier")
    if tier is None or not collection_path.match("test_*.py"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    text = collection_path.read_text("utf-8")
    return is_file_outside(tier, path, text, config.stash[LISTED]) or None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Creates no items for a function that is not in the tier."""
    config = collector.config
    if not inspect.isfunction(obj) or not collector.istestfunction(obj, name):
        return None
    tier, function = config.getoption("--tier"), f"{collector.nodeid}::{name}"
    return [] if is_outside(tier, function, config.stash[LISTED]) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the cases of each test that is marked `product` for `make test`, and marks the others
    `exhaustive`: `make test-all` runs them. Marks the tests in tests/integration.txt.

    Property tests are not measured for coverage, and neither are tests marked `no_cover`: matrices,
    long histories, all questions of a benchmark. Measuring doubles their time, and a line should
    count as covered because a test was written for it, not by chance."""
    for item in items:
        # hypothesis marks its own
        if item.get_closest_marker("hypothesis"):
            item.add_marker("no_cover")
    for cases in _group_product_cases(items).values():
        chosen = choose_cases(_number_values(cases))
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker("exhaustive")
    for item in items:
        if find_function(item.nodeid) in config.stash[LISTED]:
            item.add_marker("integration")
    if left_out := {item for item in items if _is_left_out(item)}:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    file = item.nodeid.partition("::")[0]
    return file in item.config.stash[UNCHANGED] and item.get_closest_marker("recorded") is not None


def _group_product_cases(items: Sequence[pytest.Item]) -> dict[str, list[Any]]:
    """The cases of each test that is marked `product`, in order."""
    cases: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("product"):
            cases[item.nodeid.partition("[")[0]].append(item)
    return cases


def _number_values(cases: Sequence[Any]) -> Sequence[Mapping[str, int]]:
    """The number of each parameter's value among its different values. pytest's own indices count
    the cases."""
    numbers: dict[str, dict[int, int]] = defaultdict(dict)
    return [
        {
            name: numbers[name].setdefault(id(value), len(numbers[name]))
            for name, value in case.callspec.params.items()
        }
        for case in cases
    ]


def choose_cases(cases: Sequence[Mapping[str, int]]) -> frozenset[int]:
    """Chooses cases of a test. cases: the index of each parameter's value, by parameter.

    Every value of every parameter is in a chosen case, if the test has several parameters. Of a
    parameter with more than eight values, or of the only one, at least every fourth value is. The
    choice depends on the cases alone, so it is the same on each machine. It takes the cases in an
    order that mixes the values, and chooses those that have a value not yet seen."""
    # parameters that are set together are one
    columns = {tuple(case[name] for case in cases) for name in cases[0]}
    values = [
        [at // 4 for at in column] if len(columns) == 1 or len(set(column)) > 8 else column
        for column in sorted(columns)
    ]
    seen: set[tuple[int, int]] = set()
    chosen: set[int] = set()
    for place in sorted(range(len(cases)), key=lambda place: place * 2654435761 % (1 << 32)):
        found = {(number, column[place]) for number, column in enumerate(values)}
        if not seen.issuperset(found):
            seen |= found
            chosen.add(place)
    return frozenset(chosen)


def pytest_collection_finish() -> None:
    """Excludes the collected tests from garbage collection. Tests that stop an engine or measure
    memory collect explicitly, which takes half a second with nine thousand tests in memory."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends the count of a worker to the controller, which prints the summary."""
    handed: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if handed is not None:
        handed["ties"] = session.config.stash[TIES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[TIES] += getattr(node, "workeroutput", {}).get("ties", [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left_out := config.stash[UNCHANGED]:
        terminalreporter.write_line(
            f"tests marked recorded of {len(left_out)} files are left out: what they depend on has "
            "not changed since they passed (tests/unchanged.py)"
        )
    met = config.stash[TIES]
    if met:
        terminalreporter.write_line(f"near-ties: {sum(met)} in {len(met)} compared runs")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Llama and a byte tokenizer."""
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a context that a test never fills, for requests that must still run when the
    test acts, however fast the machine is (`tiny.UNENDING`)."""
    folder = tmp_path_factory.mktemp("long") / "tiny"
    return tiny.write(folder, max_position_embeddings=tiny.LONG)


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Restores the log levels and closes the log handlers that a command in this process has set.
    Otherwise such a handler would write to the file descriptor of a stderr that pytest has closed,
    which may then belong to a socket of another test."""
    loggers = [logging.getLogger(name) for name in (None, "app", "app.access", "httpx2")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        if logger.level != level:
            logger.setLevel(level)
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, QueuedLogHandler):
            logging.getLogger().removeHandler(handler)
            handler.close()


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> MachineLock:
    """For tests that measure latencies."""
    return request.config.stash[MACHINE_LOCK]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that adds code to every child process, which runs it at startup."""

    def plant_code(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return plant_code


@pytest.fixture
def no_early_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that call `serve` in this process, and replace the server or expect an error: it
    would start a process for the model first."""
    monkeypatch.setattr("app.commands.serve.spawn_early", lambda name: nullcontext())


@pytest.fixture
def throttle(tmp_path: Path) -> Throttle:
    return Throttle(tmp_path / "throttle")
