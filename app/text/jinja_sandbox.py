"""A Jinja sandbox for chat templates, compatible with Hugging Face transformers.

Knows: jinja2, the template conventions of transformers (`utils/chat_template_utils.py`,
render_jinja_template). Must not know: where templates come from, messages, token IDs.

Templates come from models, and their input comes from clients. Both are untrusted. Jinja's sandbox
gives them no access to Python. A thread cannot be ended from outside, and holds the GIL during a
single operation in C, so a `_RenderLimit` is checked from inside:

- the clock, in every iteration of a loop and at every call, because macros may be recursive
- the size of values before they are converted to text or compared, because a list that contains
  another one twice doubles with each level
- the size of the result before an operation that may multiply its input, such as `'x' * 10**10`
- the total size of all results

Jinja evaluates constants at compile time, so compilation is limited as well. A malicious template
can still allocate many small objects within the time limit of a render.
"""

import functools
import json
import re
import time
import types
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.thread_pools import CancelToken, WorkCancelled

Clock = Callable[[], datetime]

RENDER_TIMEOUT = 5.0

# The maximum number of characters produced by all steps of one render. A long conversation needs 1
# % of this.
_MAX_RENDERED_CHARACTERS = 1 << 28

# The maximum size of a template in characters. The longest known templates need 10 % of this.
_MAX_TEMPLATE_CHARACTERS = 1 << 18

# the maximum number of characters in a template's error message
_MAX_REASON_LENGTH = 500

# These filters are intended for web pages, and their output may be much larger than their input.
_REMOVED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")

# Filters and methods whose result may be as large as their input times their arguments.
_MULTIPLIERS = frozenset(
    (
        *("batch", "center", "expandtabs", "indent", "ljust", "replace", "rjust", "round", "slice"),
        *("to_bytes", "translate", "zfill"),
    )
)

# Filters, tests and methods that convert their whole input to text, or compare it.
_TRAVERSALS = frozenset(
    (
        *("capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "striptags"),
        *("title", "trim", "truncate", "upper", "urlencode", "wordcount"),
        *("count", "dictsort", "groupby", "index", "max", "min", "sort", "unique"),
        *("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "in"),
        *("lt", "lessthan", "le", "gt", "greaterthan", "ge"),
    )
)

# The cost of a list element, and of a number, a bracket with a comma and the like, in characters.
_ELEMENT_CHARACTERS, _SCALAR_CHARACTERS = 8, 4

# the number of visited values between two checks of the clock
_CLOCK_CHECK_INTERVAL = 1024

# The maximum number of bits of an integer. It is larger than any hash, but arithmetic is still
# cheap.
_MAX_INTEGER_BITS = 1 << 16

# A width in a format that is an argument, or that Python may take seconds to read.
_UNBOUNDED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{|\d{10}")

_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_SCALARS = (str, bool, int, float, type(None))


class SandboxedTemplate:
    """A compiled template; several threads may render it at once. variables: the names that the
    template reads from its context."""

    def __init__(self, source: str, *, location: str, seconds: float = RENDER_TIMEOUT) -> None:
        """location: the path of the template's file, for error messages. seconds: the time limit of
        one render.

        Raises AppError(MODEL_FILES) if the source cannot be compiled.
        """
        self.source = source
        self._seconds = seconds
        if len(source) > _MAX_TEMPLATE_CHARACTERS:
            message = (
                f"the chat template in {location} has more than "
                f"{_MAX_TEMPLATE_CHARACTERS} characters"
            )
            raise AppError(ErrorKind.MODEL_FILES, message)
        try:
            sandbox = _Sandbox(_RenderLimit(seconds))
            parsed = sandbox.parse(source)
            self._code = sandbox.compile(parsed)
            self.variables = frozenset(find_undeclared_variables(parsed))
        except Exception as error:  # an error from Jinja, or from Python for the generated code
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            message = f"the chat template in {location} is invalid{line}: {_format_reason(error)}"
            raise AppError(ErrorKind.MODEL_FILES, message) from error
        # A sandbox takes longer to create than most templates to render. One that is not in this
        # list is used by one render.
        self._idle: list[tuple[_RenderLimit, jinja2.Template]] = []

    def render(
        self, context: Mapping[str, Any], *, now: Clock, cancel_token: CancelToken | None = None
    ) -> str:
        """Renders the template. now: the clock for templates that include the current date.

        Raises AppError(INVALID) if the template rejects the context or cannot render it. If the
        template rejects it, the error contains the template's message. Raises WorkCancelled when
        `cancel_token` is cancelled.
        """

        def strftime_now(form: str) -> str:
            return now().strftime(form)

        given = {"strftime_now": strftime_now, **context}
        limit, compiled = self._take_sandbox()
        limit.restart(cancel_token)
        try:
            return compiled.render(given)
        except _RaisedByTemplate as refusal:
            error_text = mark_client_text(_format_reason(refusal))
            raise AppError(ErrorKind.INVALID, error_text, param="messages") from refusal
        except WorkCancelled:
            raise
        except Exception as error:
            # A template may raise any exception. Usually, the conversation does not have the
            # expected format.
            reason = mark_client_text(_format_reason(error))
            message = f"the model's chat template cannot render this conversation: {reason}"
            raise AppError(ErrorKind.INVALID, message, param="messages") from error
        finally:
            self._idle.append((limit, compiled))

    def _take_sandbox(self) -> "tuple[_RenderLimit, jinja2.Template]":
        """Returns an idle sandbox, or creates one."""
        try:
            return self._idle.pop()
        except IndexError:
            limit = _RenderLimit(self._seconds)
            sandbox = _Sandbox(limit)
            globals_ = sandbox.make_globals(None)
            return limit, jinja2.Template.from_code(sandbox, self._code, globals_)


class _RaisedByTemplate(TemplateError):
    """Raised when the template calls raise_exception."""


class _RenderLimit:
    """The remaining time and size of the current render or compilation of a sandbox."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self, cancel_token: CancelToken | None = None) -> None:
        self._cancel_token = cancel_token or CancelToken()
        self._deadline = time.monotonic() + self._seconds
        self._remaining = _MAX_RENDERED_CHARACTERS

    def check_time(self) -> None:
        """Raises TimeoutError after the time limit, and WorkCancelled when the token is
        cancelled."""
        self._cancel_token.check()
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"rendering takes longer than {self._seconds:g} seconds")

    def check_size(self, count: int) -> None:
        """Raises MemoryError if `count` exceeds the remaining number of characters."""
        if count > self._remaining:
            raise MemoryError(f"rendering produces more than {_MAX_RENDERED_CHARACTERS} characters")

    def charge(self, value: object) -> None:
        """Counts a result, without the elements of a list. Raises the errors of `check_size`."""
        count = _shallow_size(value)
        self.check_size(count)
        self._remaining -= count

    def iterate(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items. Checks the clock before each item."""
        for item in items:
            self.check_time()
            yield item

    def join(self, parts: Iterable[str]) -> str:
        """Joins strings. The size is counted before the result is created."""
        pieces: list[str] = []
        total = 0
        for piece in parts:
            pieces.append(piece)
            total += len(piece)
            self.check_size(total)
        self._remaining -= total
        return "".join(pieces)

    def measure(self, value: object) -> int:
        """Estimates the number of characters of `value` as text. An element that occurs several
        times is counted each time. Stops early by raising the errors of `check_size` and
        `check_time`."""
        if isinstance(value, str | bytes):
            return len(value)
        total, visited = 0, 0
        todo: list[Any] = [value]
        while todo:
            item = todo.pop()
            visited += 1
            if visited % _CLOCK_CHECK_INTERVAL == 0:
                self.check_time()
            total += len(item) if isinstance(item, str | bytes) else _SCALAR_CHARACTERS
            inner = _children(item)
            # check before the list of values to visit grows
            self.check_size(total + len(todo) + len(inner))
            todo += inner
        return total

    def check_arguments(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Checks a call of a filter, a test or a method of this name, on a value. Raises the errors
        of `check_size` and `check_time`."""
        if name in _MULTIPLIERS:
            factor = 1 + sum(
                abs(argument) if isinstance(argument, int) else self.measure(argument)
                for argument in arguments
            )
            self.check_size(self.measure(value) * factor)
        elif name in _TRAVERSALS:
            for compared in (value, *arguments):
                self.measure(compared)

    def check_format(self, form: str, arguments: object) -> None:
        """Checks `form % arguments` and `form.format(…)`. Also raises ValueError for a width that
        is an argument."""
        if _UNBOUNDED_WIDTH.search(form):
            raise ValueError("a format must have short numbers as its widths")
        widths = sum(map(int, re.findall(r"\d+", form)))
        self.check_size(len(form) * self.measure(arguments) + widths)


def _shallow_size(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | dict | set):
        return _ELEMENT_CHARACTERS * len(cast("list[Any]", value))
    return 0


def _children(value: object) -> list[Any]:
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return [*mapping.keys(), *mapping.values()]
    if isinstance(value, Namespace):
        raise TypeError("a namespace has no text")
    return list(cast("list[Any]", value)) if isinstance(value, _CONTAINERS) else []


class _Sandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment of transformers with a limit, for one render or compilation at a
    time."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, limit: _RenderLimit) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=self._check_output,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self._limit = limit
        self.concat = limit.join
        # Jinja's stubs only declare the default filters, tests and globals.
        filters, names = cast("dict[str, Any]", self.filters), cast("dict[str, Any]", self.globals)
        for name in _REMOVED_FILTERS:
            del filters[name]
        tests = cast("dict[str, Any]", self.tests)
        filters |= {name: self._limited(name, inner) for name, inner in filters.items()}
        tests |= {name: self._limited(name, tests[name]) for name in _TRAVERSALS & tests.keys()}
        filters |= {"join": self._join, "sum": self._sum, "tojson": self._tojson}
        filters |= {
            "checked": self._check_output,
            "concatenated": self._join,
            "paced": limit.iterate,
            "sliced": self._slice,
        }
        names["raise_exception"] = _raise_exception
        del names["lipsum"]

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raises the current exception. Jinja would compile a traceback with the lines of the
        template, which takes longer than most renders, and which nothing prints."""
        if source is not None:
            super().handle_exception(source)  # a syntax error; its message becomes one line
        raise  # the exception that Jinja handles

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _SandboxRewriter(self).visit(super()._parse(source, name, filename))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._limit.check_time()
        if isinstance(obj, types.BuiltinMethodType):
            owner: Any = obj.__self__
            if isinstance(owner, str) and obj.__name__ == "join" and len(args) == 1:
                return self._join(args[0], owner)
            if isinstance(owner, str | bytes | int | list | tuple):
                self._limit.check_arguments(obj.__name__, owner, (*args, *kwargs.values()))
        result = super().call(context, obj, *args, **kwargs)
        self._limit.charge(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self._limit.check_format(left, right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (
                bits * right if operator == "**" else bits + right.bit_length()
            ) > _MAX_INTEGER_BITS:
                raise MemoryError("an integer has too many digits")
        elif operator == "*":
            value, factor = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(factor, int):
                self._limit.check_size(_shallow_size(value) * factor)
        result = super().call_binop(context, operator, left, right)
        self._limit.charge(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            self._limit.check_format(str(value.__self__), (args, kwargs))
            return inner(*args, **kwargs)

        return limited

    def _limited(self, name: str, inner: Any) -> Any:
        """Limits a filter or a test. Some take a context before the value."""
        before = 1 if hasattr(inner, "jinja_pass_arg") else 0
        has_checks = name == "format" or name in _MULTIPLIERS or name in _TRAVERSALS

        @functools.wraps(inner)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._limit.check_time()
            if has_checks:
                value, *rest = args[before:]
                rest += kwargs.values()
                if name == "format":
                    self._limit.check_format(str(self._check_output(value)), rest)
                self._limit.check_arguments(name, value, rest)
            result = inner(*args, **kwargs)
            self._limit.charge(result)
            return result

        return limited

    def _check_output(self, value: Any) -> Any:
        """Checks a value that is converted to text or compared."""
        if type(value) not in _SCALARS:
            self._limit.check_size(self._limit.measure(value))
        return value

    def _join(self, items: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
        separator = str(self._check_output(d))
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)

        def pieces() -> Iterator[str]:
            for index, item in enumerate(self._limit.iterate(items)):
                if index:
                    yield separator
                yield str(self._check_output(item))

        return self._limit.join(pieces())

    def _sum(self, items: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """Adds the items. A list of lists takes quadratic time."""
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        for item in self._limit.iterate(items):
            start = start + item
            self._limit.charge(start)
        return start

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        result = value[start:stop:step]
        self._limit.charge(result)
        return result

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Encodes JSON. Unlike Jinja's own filter, it does not escape HTML or sort keys, to match
        the training data of the models."""
        around = sum(map(len, separators or ())) + 1
        self._limit.check_size(self._limit.measure(value) * around)
        self._limit.check_size(indent if isinstance(indent, int) else len(indent or ""))
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self._limit.join(self._limit.iterate(encoder.iterencode(value)))


class _SandboxRewriter(NodeTransformer):
    """Replaces operations that Jinja compiles to plain Python with filters of the sandbox."""

    def __init__(self, sandbox: _Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._call_filter("paced", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call_filter("concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Comparing with a constant never takes long."""
        self.generic_visit(node)
        variable = [n for n in (node, *node.ops) if not isinstance(n.expr, nodes.Const)]
        if len(variable) > 1:
            for operand in variable:
                operand.expr = self._call_filter("checked", operand.expr)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Unlike lists, tuples are hashed with all of their elements."""
        self.generic_visit(node)
        return node if node.ctx == "store" else self._call_filter("checked", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        none = nodes.Const(None, lineno=node.lineno)
        bounds = (bound or none for bound in (node.arg.start, node.arg.stop, node.arg.step))
        return self._call_filter("sliced", node.node, *bounds)

    def _call_filter(self, name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
        call = nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
        call.set_environment(self._sandbox)
        return call


class _GenerationTag(Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's output for training. As in
    transformers, the sandbox only renders its body, in a separate scope."""

    tags = {"generation"}  # noqa: RUF012  # declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body, lineno=line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: object) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _format_reason(error: Exception) -> str:
    """Returns the error message on one line. Templates control the text of their errors."""
    text = " ".join(str(error)[: 2 * _MAX_REASON_LENGTH].split())
    return text if len(text) <= _MAX_REASON_LENGTH else text[:_MAX_REASON_LENGTH] + "…"
