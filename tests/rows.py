"""A table of cases as one test with a subtest for each row: `@rows` in place of `parametrize`.

Each item that pytest collects costs time and memory in every worker, even if its test takes
microseconds. A row costs less. It is reported by its ID if it fails or skips, and the remaining
rows run.

Rows share everything else in the test's environment: function-scoped fixtures are set up once for
all of them. A test that changes such a fixture (files in `tmp_path`, a patched attribute, the state
of a server) stays parametrized. So does one whose rows take several seconds together, at least by
one parameter, because a worker runs all rows of a test.

Knows: pytest's subtests and the names that it gives to parameters. Must not know: the tests.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import islice, repeat
from typing import Any

import pytest

Test = Callable[..., None]

# the type that `pytest.param` returns; pytest has no public name for it
_Param: Any = type(pytest.param())

# characters of a value that is its own ID
_LONGEST = 100


@dataclass(frozen=True, slots=True)
class Row:
    """values: an argument of the test function for each name of the table."""

    id: str
    values: Mapping[str, Any]


def rows(
    names: str | Sequence[str],
    values: Iterable[Any],
    *,
    ids: Iterable[object] | Callable[[Any], object] | None = None,
    parts: int = 1,
) -> Callable[[Test], Test]:
    """The arguments are the same as for `pytest.mark.parametrize`. Several decorators give the
    product of their rows, in the same order and with the same IDs as several `parametrize`. Both
    kinds can be combined; then every item has all rows. A table without rows fails. Marks of single
    rows, coroutines and property tests are not supported.

    parts: the number of items among which the rows are distributed in turn. More than one, at the
    outermost decorator, lets several workers share a table that takes more than about five
    seconds."""
    table = _read_rows(names, values, ids)

    def decorate(function: Test) -> Test:
        test: Test = getattr(function, "test_of_a_row", function)
        inner: Sequence[Row] | None = getattr(function, "table", None)
        product = table if inner is None else _multiply(inner, table)
        _assert_supported(test)
        assert "rows_part" not in inspect.signature(function).parameters, "parts: outermost only"
        _assert_unique([row.id for row in product])

        @functools.wraps(function)
        def run_rows(*arguments: Any, subtests: pytest.Subtests, **fixtures: Any) -> None:
            __tracebackhide__ = True
            dealt = product[fixtures.pop("rows_part", 0) :: parts]
            assert dealt, "the table has no rows"
            for row in dealt:
                with subtests.test(msg=row.id), _name_row_in_errors(row):
                    test(*arguments, **fixtures, **row.values)

        wrapper: Any = run_rows
        wrapper.test_of_a_row, wrapper.table = test, product
        # pytest reads the fixtures from it, and the place of the test from `__wrapped__`
        added = ("subtests",) if parts == 1 else ("subtests", "rows_part")
        wrapper.__signature__ = _replace_parameters(function, table, added)
        if parts == 1:
            return run_rows
        return pytest.mark.parametrize("rows_part", range(parts))(run_rows)

    return decorate


@contextmanager
def _name_row_in_errors(row: Row) -> Iterator[None]:
    """Not every report of a subtest has its message, but each has the text of the error."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        error.add_note(f"in row {row.id}")
        raise


def _read_rows(
    names: str | Sequence[str],
    values: Iterable[Any],
    ids: Iterable[object] | Callable[[Any], object] | None,
) -> Sequence[Row]:
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(values)
    # an iterator of IDs can be endless
    given = list(islice(repeat(None) if ids is None or callable(ids) else ids, len(table)))
    num_ids = len(ids) if isinstance(ids, Sized) else len(given)
    assert num_ids == len(table), f"{num_ids} IDs for {len(table)} rows"
    name_value = ids if callable(ids) else None
    result: list[Row] = []
    for place, (value, row_id) in enumerate(zip(table, given, strict=True)):
        row = value if isinstance(value, _Param) else None
        assert row is None or not row.marks, "a row cannot have marks: use parametrize"
        cells = row.values if row is not None else (value,) if len(split) == 1 else value
        assert len(cells) == len(split), f"row {place} has {len(cells)} values for {split}"
        arguments = dict(zip(split, cells, strict=True))
        row_id = row_id if row is None or row.id is None else row.id
        if row_id is None:
            texts = (_name(one, f"{name}{place}", name_value) for name, one in arguments.items())
            result.append(Row("-".join(texts), arguments))
        else:
            result.append(Row(_name(row_id, str(row_id), lambda given: given), arguments))
    return result


def _multiply(inner: Sequence[Row], outer: Sequence[Row]) -> Sequence[Row]:
    """inner: of the decorators closer to the function."""
    return [
        Row(f"{first.id}-{second.id}", {**first.values, **second.values})
        for first in inner
        for second in outer
    ]


def _name(value: object, default: str, name_value: Callable[[Any], object] | None = None) -> str:
    """Part of a row's ID, by the rules of pytest. default: for values of other types."""
    if name_value is not None and (named := name_value(value)) is not None:
        value = named
    elif isinstance(value, str | bytes) and len(value) > _LONGEST:
        return default
    if isinstance(value, str):
        return value.encode("unicode_escape").decode("ascii")
    if isinstance(value, bytes):
        return value.decode("ascii", "backslashreplace")
    if value is None or isinstance(value, int | float | complex | Enum):
        return str(value)
    if isinstance(value, re.Pattern):
        return _name(value.pattern, default)
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else default


def _assert_supported(test: Test) -> None:
    assert not inspect.iscoroutinefunction(test), "rows cannot run coroutines"
    assert not hasattr(test, "is_hypothesis_test"), "rows cannot run property tests"
    assert "subtests" not in inspect.signature(test).parameters, "rows have subtests of their own"


def _assert_unique(ids: Sequence[str]) -> None:
    twice = sorted({one for one in ids if ids.count(one) > 1}) if len(set(ids)) < len(ids) else []
    assert not twice, f"several rows have the ID {', '.join(twice)}"


def _replace_parameters(
    function: Test, table: Sequence[Row], added: Sequence[str]
) -> inspect.Signature:
    """The function's signature without the names of the table and with the added ones."""
    signature = inspect.signature(function)
    known = dict(signature.parameters)
    for name in table[0].values if table else ():
        assert name in known, f"{function.__name__} has no parameter {name!r}"
        del known[name]
    known |= {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added}
    return signature.replace(parameters=list(known.values()))
