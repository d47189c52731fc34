"""The walls between rooms: which room may import which, and who may name which package.

The two tables below define the rules; docs/internals.md describes the packages. A room's row
counts for everything below it, unless something below has a row of its own: the longest match wins.
Imports inside functions count like all others.
"""

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

EVERYTHING = frozenset({"app", "models"})

# room: what it may import of ours (itself and what lies below it always)
OURS: Mapping[str, frozenset[str]] = {
    "models": frozenset(),
    "models.builtin": frozenset(),
    "app.core": frozenset(),
    "app.text": frozenset({"app.core", "app.grammar"}),
    "app.store": frozenset({"app.core"}),
    # structured output: what a schema, a pattern or a grammar allows next
    "app.grammar": frozenset({"app.core"}),
    "app.engine": frozenset({"app.core", "app.grammar", "models"}),
    "app.engine.policy": frozenset({"app.core"}),
    "app.runners": frozenset({"app.core"}),
    "app.runners.thread_runner": frozenset(
        {"app.core", "app.engine", "app.grammar", "app.runners"}
    ),
    # what runs in the process that `app.runners.process_runner` starts
    "app.runners.worker_server": frozenset(
        {"app.core", "app.engine", "app.grammar", "app.runners"}
    ),
    # what runs in the process that `app.runners.preflight` starts
    "app.runners.preflight_main": frozenset({"app.core", "app.engine.fit", "app.runners"}),
    # what runs in the process that `app.runners.tokenizer_check` starts
    "app.runners.tokenizer_check_main": frozenset({"app.core", "app.runners", "app.text"}),
    # one engine on several ranks: like local, it holds one
    "app.runners.ranks": frozenset({"app.core", "app.engine", "app.grammar", "app.runners.codec"}),
    "app.serving.prompt_jobs": frozenset({"app.core", "app.text"}),
    "app.serving.embeddings": frozenset({"app.core", "app.text"}),
    "app.serving.generation": frozenset(
        {"app.core", "app.serving.embeddings", "app.serving.prompt_jobs", "app.text"}
    ),
    "app.serving.registry": frozenset({"app.core", "app.store", "app.engine.model_info"}),
    "app.serving.router": frozenset(
        {
            "app.core",
            "app.serving.registry",
            "app.serving.generation",
            "app.core.errors",
            "app.runners.pool",
        }
    ),
    # dialects, over HTTP without one
    "app.api": frozenset({"app.core", "app.http"}),
    "app.http": frozenset({"app.core"}),
    "app.serving.limits": frozenset({"app.core"}),
    "app.serving.event_loop_watchdog": frozenset({"app.core"}),
    # options, environment and file; commands and the root get the Settings
    "app.config": frozenset({"app.core"}),
    "app.serving.logs": frozenset({"app.core"}),
    "app.serving.otel_tracing": frozenset({"app.core"}),
    "app.serving.tracing": frozenset({"app.core", "app.serving.otel_tracing"}),
    "app.commands": EVERYTHING,
    "app.server": EVERYTHING,
    "app.cli": EVERYTHING,
    "app.__main__": frozenset({"app.cli"}),
}

# room: which packages of others it may name (the standard library always)
THEIRS: Mapping[str, frozenset[str]] = {
    "models": frozenset({"mlx"}),
    # whose library it opens, and which nobody imports
    "models.cpu_backend": frozenset({"scipy_openblas32"}),
    # model classes of others, behind our contract; an optional dependency
    "models.mlx_lm_adapter": frozenset({"mlx", "mlx_lm"}),
    # scripts that made the built-in model; they have requirements of their own
    "models.builtin": frozenset({"jax", "numpy", "safetensors", "tokenizers"}),
    "app.core": frozenset(),
    "app.text": frozenset({"tokenizers", "jinja2"}),
    "app.store": frozenset({"orjson"}),
    # the one room that knows the network, entered only when somebody asks for a model of the hub
    "app.store.hub": frozenset({"huggingface_hub", "orjson"}),
    "app.engine": frozenset({"mlx"}),
    "app.engine.weights": frozenset({"mlx", "safetensors"}),
    # a grammar says which ids may come next, and needs no tensor for it
    "app.grammar": frozenset(),
    "app.grammar.compiler": frozenset({"llguidance"}),
    "app.grammar.llguidance_backend": frozenset({"llguidance"}),
    # pure policy, so that its properties are tested without a model
    "app.engine.policy": frozenset(),
    "app.runners": frozenset(),
    "app.runners.codec": frozenset({"orjson"}),
    "app.runners.worker_client": frozenset({"httpx2"}),
    "app.runners.worker_server": frozenset({"starlette", "uvicorn"}),
    "app.serving.prompt_jobs": frozenset(),
    "app.serving.embeddings": frozenset(),
    "app.serving.generation": frozenset(),
    "app.serving.registry": frozenset(),
    "app.serving.router": frozenset(),
    "app.api": frozenset({"starlette", "orjson"}),
    # sse-starlette replaces uvicorn's exit handler when it is imported: one module names it
    "app.http.responses": frozenset({"starlette", "orjson", "sse_starlette"}),
    "app.http": frozenset({"starlette"}),
    "app.http.body": frozenset({"starlette", "orjson"}),
    # the few modules that know what carries HTTP, besides who starts it
    "app.http.connection": frozenset({"h11", "starlette", "uvicorn"}),
    "app.http.h11_connection": frozenset({"h11", "starlette"}),
    "app.http.uvicorn_internals": frozenset({"uvicorn"}),
    "app.http.uvicorn_server": frozenset({"uvicorn"}),
    "app.serving.limits": frozenset(),
    "app.serving.event_loop_watchdog": frozenset(),
    # what is counted, and how that is written, is the affair of one room
    "app.api.metrics": frozenset({"starlette", "prometheus_client"}),
    # what `mlxrunner config --toml` writes with
    "app.config": frozenset({"tomli_w"}),
    "app.serving.logs": frozenset(),
    # an optional dependency, imported where traces are asked for
    "app.serving.otel_tracing": frozenset({"opentelemetry"}),
    "app.serving.tracing": frozenset(),
    "app.commands": frozenset(),
    "app.server": frozenset({"starlette", "uvicorn"}),
    "app.cli": frozenset(),
    "app.__main__": frozenset(),
}

# scripts, which no other room may import
SEALED = frozenset({"models.builtin"})

# packages whose __init__ may say something; every other one is empty
SPEAKING = frozenset({"models", "models.kernels", "app.engine", "app.store"})

# who may find modules by their names at run time
DISCOVERING = frozenset(
    {
        "models",
        "models.mlx_lm_adapter",
        "app.api.app",
        "app.engine.prefix.policy",
        "app.text.family",
    }
)

# who may name, for type checkers alone, types of an extension that need not have been built
UNBUILT = frozenset({"models.kernels.layers"})

# packages that settle what MLX computes with before they, or what lies below them, import it
SETTLING = frozenset({"models", "app.engine"})

Sources = Mapping[str, str]


def sources() -> Sources:
    """Our modules by dotted name; a package goes by the name of its folder."""
    files = chain.from_iterable(sorted((ROOT / top).rglob("*.py")) for top in ("app", "models"))
    return {_module_name(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}


def packages() -> set[str]:
    return {
        _module_name(file.relative_to(ROOT))
        for top in ("app", "models")
        for file in (ROOT / top).rglob("__init__.py")
    }


def violations(sources: Sources, packages: set[str]) -> list[str]:
    """One sentence for each breach of the tables and of the habits around them."""
    found: list[str] = []
    for name, source in sources.items():
        tree = ast.parse(source)
        if not tree.body:
            continue
        found += [f"{name} {breach}" for breach in _habits(name, tree, name in packages)]
        found += [f"{name} {breach}" for breach in _walls(name, tree, sources)]
    return found


def room_of(name: str, rooms: Mapping[str, frozenset[str]]) -> str | None:
    """The longest row that `name` stands under."""
    return max((room for room in rooms if _under(name, room)), key=len, default=None)


def imports(tree: ast.AST, sources: Sources) -> Iterator[str]:
    """Full names of what is imported: a module where `from package import module` names one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in sources else node.module


def _walls(name: str, tree: ast.Module, sources: Sources) -> Iterator[str]:
    ours, theirs = room_of(name, OURS), room_of(name, THEIRS)
    if ours is None or theirs is None:
        yield "stands in no room of the tables"
        return
    for target in imports(tree, sources):
        top = target.partition(".")[0]
        if top in EVERYTHING:
            if not _may_enter(ours, target):
                yield f"imports {target}, which {ours} may not"
        elif top not in sys.stdlib_module_names and top not in THEIRS[theirs]:
            yield f"names {top}, which {theirs} may not"


def _may_enter(room: str, target: str) -> bool:
    if any(_under(target, sealed) and sealed != room for sealed in SEALED):
        return False
    return any(_under(target, allowed) for allowed in (room, *OURS[room]))


def _habits(name: str, tree: ast.Module, is_package: bool) -> Iterator[str]:
    if is_package and name not in SPEAKING:
        yield "has an __init__ that is not empty"
    elif ast.get_docstring(tree) is None:
        yield "does not begin with a docstring"
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(level=level) if level:
                yield "has a relative import"
            case ast.alias(name="*"):
                yield "imports *"
            case ast.alias(name="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING") if (
                name not in UNBUILT
            ):
                yield "hides imports behind TYPE_CHECKING"
            case (
                ast.Attribute(attr="import_module" | "__import__")
                | ast.Name(id="import_module" | "__import__")
            ) if name not in DISCOVERING:
                yield "imports by name at run time"
            case _:
                pass


def _under(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def _module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def test_every_module_keeps_to_its_walls():
    assert violations(sources(), packages()) == []


def test_there_is_no_import_cycle():
    found = sources()
    graph = {
        name: {target for target in imports(ast.parse(text), found) if target != name}
        for name, text in found.items()
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_what_mlx_computes_with_is_settled_before_it_is_imported():
    found = sources()
    for name, text in found.items():
        if any(_under(target, "mlx") for target in imports(ast.parse(text), found)):
            assert any(_under(name, package) for package in SETTLING), name
    for package in SETTLING:
        first = [*imports(ast.parse(found[package]), found), "mlx.core"]
        assert first.index("models.cpu_backend") < first.index("mlx.core"), package


def test_each_room_of_the_tables_exists():
    assert OURS.keys() | THEIRS.keys() <= sources().keys()


def test_every_package_in_the_table_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {
        # OpenTelemetry's distributions share one package
        re.split(r"[^\w-]|(?<=^opentelemetry)-", dependency)[0].replace("-", "_")
        for dependency in chain(project["dependencies"], *project["optional-dependencies"].values())
    }
    served = set().union(*(row for room, row in THEIRS.items() if room != "models.builtin"))
    assert served == declared


PLANTED = {
    "a wall ignored": ("app.text.x", "import app.engine.loop", "app.text may not"),
    "a wall ignored inside a function": (
        "app.api.x",
        "def f():\n    from app.text.detokenizer import Detokenizer",
        "app.api may not",
    ),
    "a module reached through its package": (
        "app.api.x",
        "from app import generation",
        "imports app, which app.api may not",
    ),
    "the engine outside its one runner": (
        "app.runners.pool",
        "from app.engine.thread import EngineThread",
        "app.runners may not",
    ),
    "a model that knows the server": ("models.x", "import app.core.errors", "models may not"),
    "a model that needs the training": (
        "models.x",
        "from models.builtin.training.train import main",
        "models may not",
    ),
    "a second module with mlx-lm": (
        "models.x",
        "from mlx_lm.models import llama",
        "models may not",
    ),
    "tensors in the policy": (
        "app.engine.policy",
        "import mlx.core as mx",
        "app.engine.policy may not",
    ),
    "HTTP's bytes where its meaning is": (
        "app.api.health",
        "from h11 import Connection",
        "app.api may not",
    ),
    "a second module that writes metrics": (
        "app.api.health",
        "from prometheus_client import Counter",
        "app.api may not",
    ),
    "a package nobody declared": ("app.core.x", "import numpy as np", "names numpy"),
    "a room nobody drew": ("app.attic", "", "no room"),
    "a relative import": ("app.core.x", "from . import errors", "relative import"),
    "a star": ("app.core.x", "from app.core.errors import *", "imports *"),
    "TYPE_CHECKING by name": (
        "app.core.x",
        "from typing import TYPE_CHECKING",
        "behind TYPE_CHECKING",
    ),
    "TYPE_CHECKING by attribute": (
        "app.core.x",
        "import typing\nif typing.TYPE_CHECKING: pass",
        "behind TYPE_CHECKING",
    ),
    "an import at run time": (
        "app.core.x",
        "import importlib\nimportlib.import_module('mlx')",
        "at run time",
    ),
}


@pytest.mark.parametrize(("name", "source", "breach"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_caught(name, source, breach):
    [found] = violations({name: f'"""Planted."""\n{source}'}, set())
    assert found.startswith(name)
    assert breach in found


def test_a_module_behind_its_package_goes_by_its_whole_name():
    tree = ast.parse("from app.core import errors\nfrom app.core.errors import AppError")
    assert set(imports(tree, {"app.core.errors": ""})) == {"app.core.errors"}


def test_a_module_without_a_docstring_is_caught():
    assert violations({"app.core.x": "A = 1"}, set()) == [
        "app.core.x does not begin with a docstring"
    ]


def test_an_init_that_says_something_is_caught():
    assert violations({"app.core": '"""Here."""'}, {"app.core"}) == [
        "app.core has an __init__ that is not empty"
    ]


def test_a_module_may_import_its_own_room():
    source = '"""Fine."""\nfrom app.text.tokenizer import Tokenizer\nimport jinja2, re'
    assert violations({"app.text.chat_template": source, "app.text.tokenizer": ""}, set()) == []
