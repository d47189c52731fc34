"""A Jinja sandbox for chat templates, compatible with Hugging Face transformers.

Knows: jinja2, the template conventions of transformers (`utils/chat_template_utils.py`,
render_jinja_template). Must not know: where templates come from, messages, token IDs.

Templates come from models, and their input comes from clients. Both are untrusted, and the sandbox
gives them no access to Python. A `RenderCostLimit` limits the render time and the size of the
output. The clock is checked in every loop iteration and at every call, because macros may be
recursive. The cost of every operation that creates text or lists is estimated or counted. Jinja
evaluates constants at compile time, so compilation is limited as well. A malicious template can
still allocate many small objects within the time limit of a render.
"""

import functools
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from app.core.errors import AppError, ErrorKind, mark_client_text
from app.core.thread_pools import CancelToken, WorkCancelled
from app.text import render_cost
from app.text.render_cost import RenderCostLimit

Clock = Callable[[], datetime]

RENDER_TIMEOUT = 5.0

# The maximum number of characters produced by all steps of one render. A long conversation needs 1
# % of this.
_MAX_RENDERED_CHARACTERS = 1 << 28

# The maximum size of a template in characters. The longest known templates need 10 % of this.
_MAX_TEMPLATE_CHARACTERS = 1 << 18

# the maximum number of characters of a template's error message
_MAX_REASON_LENGTH = 500

# These filters are intended for web pages, and their output may be much larger than their input.
_REMOVED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")


class SandboxedTemplate:
    """A compiled template. Instances are immutable. variables: the names that the template reads
    from its context."""

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
            sandbox = self._make_sandbox()
            parsed = sandbox.parse(source)
            self._code = sandbox.compile(parsed)
            self.variables = frozenset(find_undeclared_variables(parsed))
        except Exception as error:  # an error from Jinja, or from Python for the generated code
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            message = f"the chat template in {location} is invalid{line}: {_format_reason(error)}"
            raise AppError(ErrorKind.MODEL_FILES, message) from error

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
        sandbox = self._make_sandbox(cancel_token)
        try:
            compiled = jinja2.Template.from_code(sandbox, self._code, sandbox.make_globals(None))
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

    def _make_sandbox(self, cancel_token: CancelToken | None = None) -> "_Sandbox":
        return _Sandbox(
            RenderCostLimit(
                seconds=self._seconds,
                characters=_MAX_RENDERED_CHARACTERS,
                cancel_token=cancel_token,
            )
        )


class _RaisedByTemplate(TemplateError):
    """Raised when the template calls raise_exception."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment of transformers with a cost limit, for one render or one
    compilation."""

    intercepted_binops = frozenset(render_cost.OPERATORS)

    def __init__(self, limit: RenderCostLimit) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=self._check_output,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self._limit = limit
        self.concat = limit.join
        # Jinja's stubs only declare the default filters and globals.
        filters, names = cast("dict[str, Any]", self.filters), cast("dict[str, Any]", self.globals)
        for name, inner in filters.items():
            filters[name] = self._limit_filter(inner, render_cost.FILTERS.get(name))
        for name in _REMOVED_FILTERS:
            del filters[name]
        filters |= {"join": self._join_filter, "tojson": self._tojson_filter}
        filters |= {
            "concatenated": self._concatenate,
            "paced": limit.iterate,
            "sliced": self._slice,
        }
        names["raise_exception"] = _raise_exception
        del names["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _SandboxRewriter(self).visit(super()._parse(source, name, filename))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._limit.check_time()
        if isinstance(obj, types.BuiltinMethodType):
            owner: Any = obj.__self__
            if isinstance(owner, str) and obj.__name__ == "join" and len(args) == 1:
                return self._join_strings(owner, args[0])
            estimate = render_cost.METHODS.get(obj.__name__)
            if estimate is not None and isinstance(owner, str | bytes | int):
                self._limit.check_size(estimate(self._limit, owner, *args, **kwargs))
        made = super().call(context, obj, *args, **kwargs)
        self._limit.charge(made)
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._limit.check_size(render_cost.OPERATORS[operator](self._limit, left, right))
        made = super().call_binop(context, operator, left, right)
        self._limit.charge(made)
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, formatter = str(value.__self__), _Formatter(self, self._limit)

        def format(*args: Any, **kwargs: Any) -> str:
            return formatter.vformat(text, args, kwargs)

        def format_map(mapping: Mapping[str, Any], /) -> str:
            return formatter.vformat(text, (), mapping)

        return format_map if value.__name__ == "format_map" else format

    def _limit_filter(self, inner: Any, estimate: render_cost.CostEstimate | None) -> Any:
        """Wraps a filter to count its output. Some filters take a context before the value."""
        before = 1 if hasattr(inner, "jinja_pass_arg") else 0

        @functools.wraps(inner)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._limit.check_time()
            if estimate is not None:
                self._limit.check_size(self._limit.measure(args[before]))
                self._limit.check_size(estimate(self._limit, *args[before:], **kwargs))
            made = inner(*args, **kwargs)
            self._limit.charge(made)
            return made

        return counted

    def _check_output(self, value: Any) -> Any:
        """Checks a value that {{ }} outputs. Jinja converts it to text in the next step."""
        if not isinstance(value, str):
            self._limit.check_size(self._limit.measure(value))
        return value

    def _join_filter(
        self, items: Iterable[Any], d: str = "", attribute: str | int | None = None
    ) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        return self._join_strings(str(d), self._to_strings(items))

    def _concatenate(self, items: Iterable[Any]) -> str:
        """Concatenates the operands of ~."""
        return self._limit.join(self._to_strings(items))

    def _join_strings(self, separator: str, items: Iterable[str]) -> str:
        def pieces() -> Iterator[str]:
            for index, item in enumerate(self._limit.iterate(items)):
                if index:
                    yield separator
                yield item

        return self._limit.join(pieces())

    def _to_strings(self, items: Iterable[Any]) -> Iterator[str]:
        for item in items:
            yield str(self._check_output(item))

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        made = value[start:stop:step]
        self._limit.charge(made)
        return made

    def _tojson_filter(
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


class _Formatter(SandboxedFormatter):
    """`str.format` with a limit on the width of each field."""

    def __init__(self, sandbox: _Sandbox, limit: RenderCostLimit) -> None:
        super().__init__(sandbox)
        self._limit = limit

    def format_field(self, value: Any, format_spec: str) -> str:
        self._limit.check_size(render_cost.estimate_format_field(self._limit, value, format_spec))
        made: str = super().format_field(value, format_spec)
        self._limit.charge(made)
        return made


class _SandboxRewriter(NodeTransformer):
    """Replaces operations that Jinja compiles to plain Python with sandbox filters."""

    def __init__(self, sandbox: _Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._call_filter("paced", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call_filter("concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return self._call_filter("sliced", node.node, *(bound or none for bound in bounds))

    def _call_filter(self, name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
        made = nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
        made.set_environment(self._sandbox)
        return made


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
