"""Undocumented names of dependencies: each still exists, and one module uses them."""

import ast
import inspect
import re
from pathlib import Path

import uvicorn

from app.http.uvicorn_internals import UNDOCUMENTED
from tests.rows import rows

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("asyncio", "h11", "sse_starlette", "starlette", "uvicorn")


def has_attribute(cls: type, name: str) -> bool:
    """Whether the class has it, or a method of the class or of a base sets it on instances."""
    if hasattr(cls, name) or name in getattr(cls, "__annotations__", {}):
        return True
    bases = [base for base in cls.__mro__ if base is not object]
    return any(re.search(rf"self\.{name}\b", inspect.getsource(base)) for base in bases)


@rows(
    ("cls", "name"),
    [(cls, name) for cls, names in UNDOCUMENTED for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_name_still_exists(cls: type, name: str) -> None:
    assert has_attribute(cls, name), f"{cls.__module__}.{cls.__qualname__} has no {name} any more"


def test_a_missing_name_is_detected() -> None:
    assert not has_attribute(uvicorn.Server, "_no_such_name")


def private_names_of_libraries() -> set[str]:
    """The private attributes of instances of the libraries' classes."""
    names: set[str] = set()
    for cls, _ in UNDOCUMENTED:
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] in LIBRARIES:
                names |= set(re.findall(r"self\.(_[a-z]\w*)", inspect.getsource(base)))
                names |= {name for name in vars(base) if re.match(r"_[a-z]", name)}
    return names


def test_no_other_module_uses_private_names() -> None:
    """Our own classes may have a private attribute of the same name, unless they inherit from a
    library's class."""
    names = private_names_of_libraries()
    assert "_captured_signals" in names
    used: list[str] = []
    for file in sorted((ROOT / "app").rglob("*.py")):
        if file.name == "uvicorn_internals.py":
            continue
        tree = ast.parse(file.read_text("utf-8"))
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef() if any(is_library_base(base) for base in node.bases):
                    used += [
                        f"{file.relative_to(ROOT)}: {inner.attr}"
                        for inner in ast.walk(node)
                        if isinstance(inner, ast.Attribute) and inner.attr in names
                    ]
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] in LIBRARIES:
                    used += [
                        f"{file.relative_to(ROOT)}: {alias.name}"
                        for alias in node.names
                        if alias.name.startswith("_")
                    ]
                case _:
                    pass
    assert used == []


def is_library_base(base: ast.expr) -> bool:
    return ast.unparse(base).startswith(("Hooked", "uvicorn.", "asyncio."))
