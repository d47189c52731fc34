"""`make size`: how large the product's files and functions are, and which modules are fragments.

A fragment is a module of at most 130 lines with exactly one importer. In folders where each file is
a plug-in (a model architecture, a chat family, a command), small files are meant and not counted.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FRAGMENT_LINES = 130

PLUGIN_FOLDERS = (
    "app/commands/",
    "app/engine/prefix/",
    "app/engine/sampling/",
    "app/text/families/",
    "app/text/syntax/",
)


@dataclass(frozen=True)
class Module:
    path: str
    lines: int
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def is_plugin(self) -> bool:
        architecture = any(
            isinstance(node, ast.ClassDef) and node.name == "Model" for node in self.tree.body
        )
        dialect = any(
            isinstance(node, ast.FunctionDef) and node.name == "routes" for node in self.tree.body
        )
        return self.path.startswith(PLUGIN_FOLDERS) or architecture or dialect


def load_modules() -> dict[str, Module]:
    """The product's modules by dotted name."""
    modules: dict[str, Module] = {}
    for folder in ("app", "models"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            text = file.read_text("utf-8")
            path = file.relative_to(ROOT).as_posix()
            module = Module(path, len(text.splitlines()), ast.parse(text))
            modules[module.name] = module
    return modules


def find_importers(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Module → the modules that import it."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, module in modules.items():
        for node in ast.walk(module.tree):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full_name = f"{node.module}.{alias.name}"
                    targets.append(full_name if full_name in modules else node.module)
            elif isinstance(node, ast.Import):
                targets += [alias.name for alias in node.names]
            for target in targets:
                if target in modules and target != name:
                    importers[target].add(name)
    return importers


def find_fragments(modules: Mapping[str, Module]) -> list[Module]:
    importers = find_importers(modules)
    return [
        module
        for name, module in modules.items()
        if module.lines <= FRAGMENT_LINES
        and len(importers[name]) == 1
        and not module.path.endswith("__init__.py")
        and not module.is_plugin
    ]


def iter_functions(module: Module) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function, without decorators."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def main() -> None:
    modules = load_modules()
    by_length = sorted(modules.values(), key=lambda module: module.lines)
    for module in by_length[-20:]:
        print(f"{module.lines:5}  {module.path}")
    lines = [module.lines for module in by_length]
    print(f"{sum(lines):5}  lines in {len(lines)} files, median {lines[len(lines) // 2]}")
    longest = sorted(
        (length, f"{module.path}: {name}")
        for module in modules.values()
        for name, length in iter_functions(module)
    )
    print("\nlongest functions")
    for length, name in longest[-5:]:
        print(f"{length:5}  {name}")
    fragments = find_fragments(modules)
    print(f"\nmodules of at most {FRAGMENT_LINES} lines with one importer: {len(fragments)}")
    for module in fragments:
        print(f"{module.lines:5}  {module.path}")


if __name__ == "__main__":
    main()
