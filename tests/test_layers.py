"""Import rules: the packages of ours and of others that each package may import.

The two tables below define the rules; ARCHITECTURE.md describes the packages. The row of a
package applies to everything below it, except for modules with their own row: the longest match
wins. Imports inside functions count like all others.
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

# package: our packages that it may import (besides itself and its subpackages)
OUR_PACKAGES: Mapping[str, frozenset[str]] = {
    "models": frozenset(),
    "app.core": frozenset(),
    "app.text": frozenset({"app.core", "app.grammar", "app.images.plan"}),
    "app.store": frozenset({"app.core"}),
    # headers and metadata of GGUF files, without tensors
    "app.store.gguf": frozenset(
        {
            "app.core",
            "app.store.cache_folder",
            "models.gguf.architectures",
            "models.gguf.metadata",
            "models.gguf.ollama_towers",
            "models.gguf.ollama_variant",
            "models.gguf.projectors",
            "models.gguf.reader",
        }
    ),
    # structured output: schemas, patterns and grammars
    "app.grammar": frozenset({"app.core"}),
    "app.engine": frozenset({"app.core", "app.grammar", "models"}),
    "app.engine.policy": frozenset({"app.core"}),
    "app.engine.memory_policy": frozenset(),
    "app.runners": frozenset({"app.core"}),
    "app.runners.thread_runner": frozenset(
        {"app.core", "app.engine", "app.grammar", "app.runners"}
    ),
    # runs in the process that `app.runners.process_runner` starts
    "app.runners.worker": frozenset({"app.core", "app.engine", "app.grammar", "app.runners"}),
    # the entry point of that process
    "app.runners.worker_main": frozenset({"app.core", "app.engine.wired_memory", "app.runners"}),
    # runs in the process that `app.runners.preflight` starts
    "app.runners.preflight_main": frozenset({"app.core", "app.engine.fit", "app.runners"}),
    # runs in the process that `app.runners.tokenizer_check` starts
    "app.runners.tokenizer_check_main": frozenset({"app.core", "app.runners", "app.text"}),
    # one engine on several ranks
    "app.runners.ranks": frozenset(
        {
            "app.core",
            "app.engine",
            "app.grammar",
            "app.runners.channel",
            "app.runners.worker_protocol",
        }
    ),
    # images of requests: headers, geometry, the process that decodes them
    "app.images": frozenset({"app.core"}),
    "app.images.decoder_main": frozenset({"app.core", "app.images", "app.runners.parent_watch"}),
    "app.serving.prompt_jobs": frozenset(
        {"app.core", "app.images", "app.serving.image_input", "app.text"}
    ),
    "app.serving.embeddings": frozenset({"app.core", "app.serving.pooling_config", "app.text"}),
    "app.serving.pooling_config": frozenset({"app.core"}),
    "app.serving.generation": frozenset(
        {
            "app.core",
            "app.images",
            "app.serving.embeddings",
            "app.serving.image_input",
            "app.serving.prompt_jobs",
            "app.text",
        }
    ),
    "app.serving.registry": frozenset({"app.core", "app.store", "app.engine.model_info"}),
    "app.serving.model_library": frozenset(
        {"app.core", "app.store", "app.serving.registry", "app.engine.model_info"}
    ),
    "app.serving.image_input": frozenset({"app.core", "app.images"}),
    "app.serving.model_describer": frozenset(
        {"app.core", "app.serving.pooling_config", "app.store", "app.text"}
    ),
    "app.serving.adapters": frozenset({"app.core", "app.runners.pool", "app.serving.registry"}),
    "app.serving.router": frozenset(
        {
            "app.core",
            "app.images",
            "app.serving.adapters",
            "app.serving.model_describer",
            "app.serving.registry",
            "app.serving.generation",
            "app.serving.image_input",
            "app.core.errors",
            "app.runners.pool",
        }
    ),
    # dialects may import app.http, but app.http no dialect
    "app.api": frozenset({"app.core", "app.http", "app.images"}),
    "app.http": frozenset({"app.core"}),
    # options, environment and file; commands and the server get the Settings
    "app.config": frozenset({"app.core"}),
    "app.serving.reload_signal": frozenset(),
    "app.serving.keep_awake": frozenset({"app.core"}),
    "app.serving.usage_file": frozenset({"app.core"}),
    # a client of any server
    "app.bench": frozenset({"app.core"}),
    "app.prove": frozenset(
        {"app.core", "app.engine", "app.grammar", "app.runners.channel", "app.serving.prompt_jobs"}
    ),
    # logs, traces, the watchdog of the event loop
    "app.observability": frozenset({"app.core"}),
    "app.commands": EVERYTHING,
    "app.server": EVERYTHING,
    "app.cli": EVERYTHING,
    "app.__main__": frozenset({"app.cli"}),
}

# package: the third-party packages that it may import (besides the standard library)
THIRD_PARTY_PACKAGES: Mapping[str, frozenset[str]] = {
    "models": frozenset({"mlx"}),
    # loads the shared library of this package, which no module imports
    "models.cpu_backend": frozenset({"scipy_openblas32"}),
    # model classes of mlx-lm behind our interface
    "models.mlx_lm_adapter": frozenset({"mlx", "mlx_lm"}),
    "app.core": frozenset(),
    # messages that are sent between processes
    "app.core.images": frozenset({"msgspec"}),
    "app.core.jobs": frozenset({"msgspec"}),
    "app.core.requests": frozenset({"msgspec"}),
    "app.text": frozenset({"tokenizers", "jinja2"}),
    "app.store": frozenset({"orjson"}),
    # the only package that uses the internet, imported only for models of the hub
    "app.store.gguf": frozenset({"orjson"}),
    "app.store.hub": frozenset({"httpx2", "huggingface_hub", "orjson"}),
    "app.engine": frozenset({"mlx"}),
    "app.engine.weights": frozenset({"mlx", "safetensors"}),
    # grammars compute the allowed token ids without tensors
    "app.grammar": frozenset(),
    "app.grammar.compiler": frozenset({"llguidance"}),
    "app.grammar.llguidance_backend": frozenset({"llguidance"}),
    # pure functions, tested without a model
    "app.engine.policy": frozenset(),
    "app.engine.memory_policy": frozenset(),
    "app.runners": frozenset(),
    "app.runners.channel": frozenset({"msgspec"}),
    "app.runners.handle": frozenset({"msgspec"}),
    "app.runners.worker": frozenset({"msgspec"}),
    "app.runners.worker_protocol": frozenset({"msgspec"}),
    "app.runners.ranks.protocol": frozenset({"msgspec"}),
    "app.images": frozenset(),
    # an HTTP client for the hosts that an administrator allows
    "app.images.fetch": frozenset({"h11"}),
    # the only module that imports an image library, in its own process
    "app.images.decoder_main": frozenset({"PIL"}),
    "app.serving.prompt_jobs": frozenset({"msgspec"}),
    "app.serving.embeddings": frozenset(),
    "app.serving.pooling_config": frozenset(),
    "app.serving.generation": frozenset(),
    "app.serving.registry": frozenset(),
    "app.serving.model_library": frozenset(),
    "app.serving.image_input": frozenset(),
    "app.serving.model_describer": frozenset(),
    "app.serving.adapters": frozenset(),
    "app.serving.router": frozenset(),
    "app.api": frozenset({"msgspec", "starlette", "orjson"}),
    # request bodies as structs
    "app.api.schema": frozenset({"msgspec", "orjson"}),
    # sse-starlette replaces uvicorn's exit handler at import: only one module imports it
    "app.http.streaming": frozenset({"starlette", "orjson", "sse_starlette"}),
    "app.http.responses": frozenset({"starlette", "orjson"}),
    "app.http": frozenset({"starlette"}),
    "app.http.body": frozenset({"msgspec", "starlette", "orjson"}),
    # the few modules that depend on the HTTP implementation, besides app.server
    "app.http.connection": frozenset({"h11", "starlette", "uvicorn"}),
    "app.http.uvicorn_internals": frozenset({"uvicorn"}),
    "app.http.uvicorn_server": frozenset({"uvicorn"}),
    # metrics are collected and rendered in one package
    "app.api.metrics": frozenset({"starlette", "prometheus_client"}),
    # for `mlxrunner config --toml`
    "app.config": frozenset({"tomli_w"}),
    "app.serving.reload_signal": frozenset(),
    "app.serving.keep_awake": frozenset(),
    "app.serving.usage_file": frozenset(),
    # an optional dependency, imported only if tracing is enabled
    "app.observability.otel_tracing": frozenset({"opentelemetry"}),
    "app.bench": frozenset(),
    "app.prove": frozenset(),
    "app.bench.client": frozenset({"h11"}),
    "app.observability": frozenset(),
    "app.commands": frozenset(),
    "app.server": frozenset({"starlette", "uvicorn"}),
    "app.cli": frozenset(),
    "app.__main__": frozenset(),
}

# packages whose __init__ may have content; all others must be empty
PACKAGES_WITH_INIT = frozenset(
    {"models", "models.kernels", "app.api.schema", "app.engine", "app.store"}
)

# modules that may import others by name at run time
RUN_TIME_IMPORTERS = frozenset(
    {
        "models.architectures",
        "models.mlx_lm_adapter",
        # reads the source text of mlx-lm's classes
        "models.mlx_lm_config",
        "models.vision.build",
        "app.api.app",
        "app.engine.prefix.cache",
        "app.server",
        "app.text.family",
    }
)

# modules that may import types for type checkers only: of an optional extension, of a library that
# a server loads only when it downloads a model or sends traces, or of the HTTP server, which is
# imported while the first model starts to load
TYPE_CHECKING_MODULES = frozenset(
    {
        "models.kernels.layers",
        "app.commands.pull",
        "app.serving.model_library",
        "app.observability.tracing",
        "app.server",
    }
)

# packages that set up the compute backend before they, or their modules, import MLX
BACKEND_SETUP_PACKAGES = frozenset({"models", "app.engine"})

Sources = Mapping[str, str]


def read_sources() -> Sources:
    """Our modules by dotted name; a package has the name of its folder."""
    files = chain.from_iterable(sorted((ROOT / top).rglob("*.py")) for top in ("app", "models"))
    return {_module_name(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}


def list_packages() -> set[str]:
    return {
        _module_name(file.relative_to(ROOT))
        for top in ("app", "models")
        for file in (ROOT / top).rglob("__init__.py")
    }


def find_violations(sources: Sources, packages: set[str]) -> list[str]:
    """One sentence for each violation of the tables and of the style rules."""
    violations: list[str] = []
    for name, source in sources.items():
        tree = ast.parse(source)
        if not tree.body:
            continue
        violations += [
            f"{name} {violation}" for violation in _check_style(name, tree, name in packages)
        ]
        violations += [f"{name} {violation}" for violation in _check_imports(name, tree, sources)]
    return violations


def find_row(name: str, table: Mapping[str, frozenset[str]]) -> str | None:
    """The longest row that applies to `name`."""
    return max((key for key in table if _under(name, key)), key=len, default=None)


def iter_imports(tree: ast.AST, sources: Sources) -> Iterator[str]:
    """The full names of the imports; `from package import module` yields the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                full_name = f"{node.module}.{alias.name}"
                yield full_name if full_name in sources else node.module


def _check_imports(name: str, tree: ast.Module, sources: Sources) -> Iterator[str]:
    our_row, third_party_row = find_row(name, OUR_PACKAGES), find_row(name, THIRD_PARTY_PACKAGES)
    if our_row is None or third_party_row is None:
        yield "is in no row of the tables"
        return
    for target in iter_imports(tree, sources):
        top = target.partition(".")[0]
        if top in EVERYTHING:
            if not _may_import(our_row, target):
                yield f"imports {target}, which {our_row} may not"
        elif (
            top not in sys.stdlib_module_names and top not in THIRD_PARTY_PACKAGES[third_party_row]
        ):
            yield f"names {top}, which {third_party_row} may not"


def _may_import(row: str, target: str) -> bool:
    return any(_under(target, allowed) for allowed in (row, *OUR_PACKAGES[row]))


def _check_style(name: str, tree: ast.Module, is_package: bool) -> Iterator[str]:
    if is_package and name not in PACKAGES_WITH_INIT:
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
                name not in TYPE_CHECKING_MODULES
            ):
                yield "hides imports behind TYPE_CHECKING"
            case (
                ast.Attribute(attr="import_module" | "__import__")
                | ast.Name(id="import_module" | "__import__")
            ) if name not in RUN_TIME_IMPORTERS:
                yield "imports by name at run time"
            case _:
                pass


def _under(name: str, row: str) -> bool:
    return name == row or name.startswith(f"{row}.")


def _module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def test_every_module_follows_the_import_rules():
    assert find_violations(read_sources(), list_packages()) == []


def test_there_is_no_import_cycle():
    sources = read_sources()
    graph = {
        name: {target for target in iter_imports(ast.parse(text), sources) if target != name}
        for name, text in sources.items()
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_the_compute_backend_is_set_up_before_mlx_is_imported():
    sources = read_sources()
    for name, text in sources.items():
        if any(_under(target, "mlx") for target in iter_imports(ast.parse(text), sources)):
            assert any(_under(name, package) for package in BACKEND_SETUP_PACKAGES), name
    for package in BACKEND_SETUP_PACKAGES:
        first = [*iter_imports(ast.parse(sources[package]), sources), "mlx.core"]
        assert first.index("models.cpu_backend") < first.index("mlx.core"), package


def test_each_row_of_the_tables_exists():
    assert OUR_PACKAGES.keys() | THIRD_PARTY_PACKAGES.keys() <= read_sources().keys()


def test_every_package_in_the_table_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {
        # OpenTelemetry's distributions share one package
        re.split(r"[^\w-]|(?<=^opentelemetry)-", dependency)[0].replace("-", "_")
        for dependency in chain(project["dependencies"], *project["optional-dependencies"].values())
    }
    names = {"PIL": "pillow"}  # a package and its distribution
    imported = {names.get(one, one) for row in THIRD_PARTY_PACKAGES.values() for one in row}
    assert imported == declared


PLANTED = {
    "a forbidden import": ("app.text.x", "import app.engine.loop", "app.text may not"),
    "a forbidden import inside a function": (
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
    "a model that imports the server": ("models.x", "import app.core.errors", "models may not"),
    "a model that needs the training": (
        "models.x",
        "from tools.builtin_model.train import main",
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
    "the HTTP parser in the API": (
        "app.api.status",
        "from h11 import Connection",
        "app.api may not",
    ),
    "a second module that writes metrics": (
        "app.api.status",
        "from prometheus_client import Counter",
        "app.api may not",
    ),
    "an undeclared package": ("app.core.x", "import numpy as np", "names numpy"),
    "an unknown package": ("app.attic", "", "no row"),
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


@pytest.mark.parametrize(("name", "source", "violation"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_found(name, source, violation):
    [found] = find_violations({name: f'"""Planted."""\n{source}'}, set())
    assert found.startswith(name)
    assert violation in found


def test_a_module_imported_from_its_package_has_its_full_name():
    tree = ast.parse("from app.core import errors\nfrom app.core.errors import AppError")
    assert set(iter_imports(tree, {"app.core.errors": ""})) == {"app.core.errors"}


def test_a_module_without_a_docstring_is_found():
    assert find_violations({"app.core.x": "A = 1"}, set()) == [
        "app.core.x does not begin with a docstring"
    ]


def test_an_init_with_content_is_found():
    assert find_violations({"app.core": '"""Content."""'}, {"app.core"}) == [
        "app.core has an __init__ that is not empty"
    ]


def test_a_module_may_import_its_own_package():
    source = '"""Fine."""\nfrom app.text.tokenizer import Tokenizer\nimport jinja2, re'
    assert (
        find_violations({"app.text.chat_template": source, "app.text.tokenizer": ""}, set()) == []
    )
