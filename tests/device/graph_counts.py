"""Counts the parts of a lazy graph, and the calls that wait for the device.

Knows: MLX's graphs as MLX exports them. Must not know: models, the engine. Imports nothing but MLX,
so that benchmarks/graph_worker.py can use it with mlx-lm.
"""

import io
import re
import traceback
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

# Primitives that compute nothing on a GPU, unless their input is scattered in memory.
VIEWS = frozenset(
    {"AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape"}
    | {"Slice", "Split", "Squeeze", "Transpose", "Unflatten"}
)

# Copies each of its inputs with a separate kernel.
_CONCATENATE = "Concatenate"

_PRIMITIVE = re.compile(r'(\d+) \[label ?="([^"]+)"[^\]]*shape=rectangle')
_EDGE = re.compile(r'^"\w+" -> (\d+)$', re.MULTILINE)

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCounts:
    """by_name: the number of nodes of each primitive. launches: the kernels that a GPU would
    launch. It is an estimate: a view of scattered memory is copied, and some primitives of MLX
    launch several kernels."""

    by_name: Mapping[str, int]
    launches: int

    @property
    def nodes(self) -> int:
        return sum(self.by_name.values())


def count_graph(arrays: Iterable[Any]) -> GraphCounts:
    """Counts the primitives that have to be evaluated for these arrays, or trees of arrays."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *flatten_arrays(arrays))
    text = dot.getvalue()
    # All calls to a compiled function share one primitive, so its identity is not a key.
    primitives = _PRIMITIVE.findall(text)
    concatenations = {identity for identity, name in primitives if name == _CONCATENATE}
    copies = sum(target in concatenations for target in _EDGE.findall(text))
    by_name = Counter(name for _, name in primitives)
    single = [name for _, name in primitives if name not in VIEWS and name != _CONCATENATE]
    return GraphCounts(by_name=by_name, launches=len(single) + copies)


def flatten_arrays(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, dict):
        return flatten_arrays(tree.values())
    return [] if tree is None else [array for part in tree for array in flatten_arrays(part)]


@contextmanager
def record_dispatched_graphs() -> Generator[list[GraphCounts]]:
    """Counts the graph of each call of mx.async_eval."""
    counts: list[GraphCounts] = []
    dispatch = mx.async_eval

    def record(*arrays: Any) -> None:
        counts.append(count_graph(arrays))
        dispatch(*arrays)

    with patch.object(mx, "async_eval", record):
        yield counts


@contextmanager
def record_waits() -> Generator[list[str]]:
    """Records the callers of functions that wait for the device, as `file:line function`."""
    waits: list[str] = []

    def wrap(function: Any) -> Any:
        def wait(*arguments: Any, **options: Any) -> Any:
            waits.append(_find_caller())
            return function(*arguments, **options)

        return wait

    with ExitStack() as stack:
        for name in ("eval", "synchronize"):
            stack.enter_context(patch.object(mx, name, wrap(getattr(mx, name))))
        for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
            method = wrap(getattr(mx.array, name))
            stack.enter_context(patch.object(mx.array, name, method))
        yield waits


def _find_caller() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in ("app", "models"):
            return f"{path.relative_to(_ROOT)}:{frame.lineno} {frame.name}"
    return "a test"
