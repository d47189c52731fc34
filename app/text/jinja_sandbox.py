"""Jinja, as chat templates expect it and as safe as it can be made.

Knows: jinja2, and the conventions that templates are written against: those of Hugging Face
transformers (`utils/chat_template_utils.py`, render_jinja_template). Must not know: where
templates come from, messages, token ids.

Templates come with models, and what they are given comes from strangers. The sandbox keeps both
away from Python. A `RenderCostLimit` keeps a render from going on for ever, and from making more
text than any prompt has: the clock is looked at in every turn of every loop and at every call
(which is how macros recurse), and whatever makes text or lists is weighed or counted. Jinja
computes constants when it compiles, so compiling has a budget as well. What a hostile template can
still do is fill memory with small things as fast as Python makes them, for as long as a render may
take.
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

# that one render may make in all its steps; a long conversation is a hundredth of it
_MAX_RENDERED_CHARACTERS = 1 << 28

# of a template; the longest that are known have a tenth of it
_MAX_TEMPLATE_CHARACTERS = 1 << 18

# of what a template says when it fails
_MAX_REASON_LENGTH = 500

# They write web pages, and make much of little.
_REMOVED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")


class SandboxedTemplate:
    """A compiled template; immutable. variables: what it looks for in its context."""

    def __init__(self, source: str, *, location: str, seconds: float = RENDER_TIMEOUT) -> None:
        """location: where it stands, for whoever has to mend it. seconds: how long one render may
        take.

        Raises AppError(MODEL_FILES) when the source cannot be compiled.
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
        except Exception as error:  # Jinja's, or Python's about what Jinja made of it
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            message = f"the chat template in {location} is invalid{line}: {_format_reason(error)}"
            raise AppError(ErrorKind.MODEL_FILES, message) from error

    def render(
        self, context: Mapping[str, Any], *, now: Clock, cancel_token: CancelToken | None = None
    ) -> str:
        """now: the clock of templates that tell the model what day it is.

        Raises AppError(INVALID): in the template's own words when it refuses the context.
        Cancelled when `cancel_token` is.
        """

        def strftime_now(form: str) -> str:
            return now().strftime(form)

        given = {"strftime_now": strftime_now, **context}
        sandbox = self._make_sandbox(cancel_token)
        try:
            compiled = jinja2.Template.from_code(sandbox, self._code, sandbox.make_globals(None))
            return compiled.render(given)
        except _RaisedByTemplate as refusal:
            words = mark_client_text(_format_reason(refusal))
            raise AppError(ErrorKind.INVALID, words, param="messages") from refusal
        except WorkCancelled:
            raise
        except Exception as error:
            # A program that we did not write may fail in every way there is; mostly because the
            # conversation is not of the shape that it was written for.
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
    """The template called raise_exception."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers, for one render or one compilation, with its budget."""

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
        # Jinja's stubs know only the filters and globals that are there from the beginning.
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
        """A filter, with what it makes counted. Some take a context before the value."""
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
        """Whatever {{ }} shows: it is made a text next."""
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
        """What ~ stands between."""
        return self._limit.join(self._to_strings(items))

    def _join_strings(self, separator: str, items: Iterable[str]) -> str:
        def pieces() -> Iterator[str]:
            for place, item in enumerate(self._limit.iterate(items)):
                if place:
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
        """Jinja's own filter escapes HTML and sorts keys. Models were trained on neither."""
        around = sum(map(len, separators or ())) + 1
        self._limit.check_size(self._limit.measure(value) * around)
        self._limit.check_size(indent if isinstance(indent, int) else len(indent or ""))
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self._limit.join(self._limit.iterate(encoder.iterencode(value)))


class _Formatter(SandboxedFormatter):
    """`str.format`, each of whose fields may be as wide as it says."""

    def __init__(self, sandbox: _Sandbox, limit: RenderCostLimit) -> None:
        super().__init__(sandbox)
        self._limit = limit

    def format_field(self, value: Any, format_spec: str) -> str:
        self._limit.check_size(render_cost.estimate_format_field(self._limit, value, format_spec))
        made: str = super().format_field(value, format_spec)
        self._limit.charge(made)
        return made


class _SandboxRewriter(NodeTransformer):
    """What Jinja compiles to plain Python goes through the sandbox's filters instead."""

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
    """{% generation %}…{% endgeneration %} marks, for training, what the assistant says. Here it
    is its body and nothing more; in a scope of its own, as there."""

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
    """What it says, on one line. Templates put what they like into their errors."""
    text = " ".join(str(error)[: 2 * _MAX_REASON_LENGTH].split())
    return text if len(text) <= _MAX_REASON_LENGTH else text[:_MAX_REASON_LENGTH] + "…"
