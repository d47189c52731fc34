"""Jinja, as chat templates expect it and as safe as it can be made.

Knows: jinja2, and the conventions that templates are written against: those of Hugging Face
transformers (`utils/chat_template_utils.py`, render_jinja_template). Must not know: where
templates come from, messages, token ids.

Templates come with models, and what they are given comes from strangers. The sandbox keeps both
away from Python. A `Budget` keeps a render from going on for ever, and from making more text than
any prompt has: the clock is looked at in every turn of every loop and at every call (which is how
macros recurse), and whatever makes text or lists is weighed or counted. Jinja computes constants
when it compiles, so compiling has a budget as well. What a hostile template can still do is fill
memory with small things as fast as Python makes them, for as long as a render may take.
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

from app.core.errors import AppError, Kind, quote_client
from app.core.workers import Cancelled, CancelToken
from app.text import estimates
from app.text.budget import Budget

Clock = Callable[[], datetime]

RENDER_SECONDS = 5.0

# that one render may make in all its steps; a long conversation is a hundredth of it
_CHARACTERS = 1 << 28

# of a template; the longest that are known have a tenth of it
_LONGEST = 1 << 18

# of what a template says when it fails
_SHOWN = 500

# They write web pages, and make much of little.
_NOT_HERE = ("pprint", "urlize", "wordwrap", "xmlattr")


class Template:
    """A compiled template; immutable. variables: what it looks for in its context."""

    def __init__(self, source: str, *, place: str, seconds: float = RENDER_SECONDS) -> None:
        """place: where it stands, for whoever has to mend it. seconds: how long one render may
        take.

        Raises AppError(MODEL_FILES) when the source cannot be compiled.
        """
        self.source = source
        self._seconds = seconds
        if len(source) > _LONGEST:
            message = f"the chat template in {place} has more than {_LONGEST} characters"
            raise AppError(Kind.MODEL_FILES, message)
        try:
            sandbox = self._sandbox()
            parsed = sandbox.parse(source)
            self._code = sandbox.compile(parsed)
            self.variables = frozenset(find_undeclared_variables(parsed))
        except Exception as error:  # Jinja's, or Python's about what Jinja made of it
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            message = f"the chat template in {place} is invalid{line}: {_clause(error)}"
            raise AppError(Kind.MODEL_FILES, message) from error

    def render(
        self, context: Mapping[str, Any], *, now: Clock, token: CancelToken | None = None
    ) -> str:
        """now: the clock of templates that tell the model what day it is.

        Raises AppError(INVALID): in the template's own words when it refuses the context.
        Cancelled when `token` is.
        """

        def strftime_now(form: str) -> str:
            return now().strftime(form)

        given = {"strftime_now": strftime_now, **context}
        sandbox = self._sandbox(token)
        try:
            compiled = jinja2.Template.from_code(sandbox, self._code, sandbox.make_globals(None))
            return compiled.render(given)
        except _Refusal as refusal:
            words = quote_client(_clause(refusal))
            raise AppError(Kind.INVALID, words, param="messages") from refusal
        except Cancelled:
            raise
        except Exception as error:
            # A program that we did not write may fail in every way there is; mostly because the
            # conversation is not of the shape that it was written for.
            reason = quote_client(_clause(error))
            message = f"the model's chat template cannot render this conversation: {reason}"
            raise AppError(Kind.INVALID, message, param="messages") from error

    def _sandbox(self, token: CancelToken | None = None) -> "_Sandbox":
        return _Sandbox(Budget(seconds=self._seconds, characters=_CHARACTERS, token=token))


class _Refusal(TemplateError):
    """The template called raise_exception."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers, for one render or one compilation, with its budget."""

    intercepted_binops = frozenset(estimates.OPERATORS)

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=self._finalized,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self._budget = budget
        self.concat = budget.join
        # Jinja's stubs know only the filters and globals that are there from the beginning.
        filters, names = cast("dict[str, Any]", self.filters), cast("dict[str, Any]", self.globals)
        for name, inner in filters.items():
            filters[name] = self._counted(inner, estimates.FILTERS.get(name))
        for name in _NOT_HERE:
            del filters[name]
        filters |= {"join": self._join, "tojson": self._to_json}
        filters |= {
            "concatenated": self._concatenated,
            "paced": budget.pace,
            "sliced": self._sliced,
        }
        names["raise_exception"] = _refuse
        del names["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Hooks(self).visit(super()._parse(source, name, filename))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._budget.check()
        if isinstance(obj, types.BuiltinMethodType):
            owner: Any = obj.__self__
            if isinstance(owner, str) and obj.__name__ == "join" and len(args) == 1:
                return self._joined(owner, args[0])
            estimate = estimates.METHODS.get(obj.__name__)
            if estimate is not None and isinstance(owner, str | bytes | int):
                self._budget.afford(estimate(self._budget, owner, *args, **kwargs))
        made = super().call(context, obj, *args, **kwargs)
        self._budget.spend(made)
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._budget.afford(estimates.OPERATORS[operator](self._budget, left, right))
        made = super().call_binop(context, operator, left, right)
        self._budget.spend(made)
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, formatter = str(value.__self__), _Formatter(self, self._budget)

        def format(*args: Any, **kwargs: Any) -> str:
            return formatter.vformat(text, args, kwargs)

        def format_map(mapping: Mapping[str, Any], /) -> str:
            return formatter.vformat(text, (), mapping)

        return format_map if value.__name__ == "format_map" else format

    def _counted(self, inner: Any, estimate: estimates.Estimate | None) -> Any:
        """A filter, with what it makes counted. Some take a context before the value."""
        before = 1 if hasattr(inner, "jinja_pass_arg") else 0

        @functools.wraps(inner)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._budget.check()
            if estimate is not None:
                self._budget.afford(self._budget.weigh(args[before]))
                self._budget.afford(estimate(self._budget, *args[before:], **kwargs))
            made = inner(*args, **kwargs)
            self._budget.spend(made)
            return made

        return counted

    def _finalized(self, value: Any) -> Any:
        """Whatever {{ }} shows: it is made a text next."""
        if not isinstance(value, str):
            self._budget.afford(self._budget.weigh(value))
        return value

    def _join(self, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        return self._joined(str(d), self._texts(items))

    def _concatenated(self, items: Iterable[Any]) -> str:
        """What ~ stands between."""
        return self._budget.join(self._texts(items))

    def _joined(self, separator: str, items: Iterable[str]) -> str:
        def pieces() -> Iterator[str]:
            for place, item in enumerate(self._budget.pace(items)):
                if place:
                    yield separator
                yield item

        return self._budget.join(pieces())

    def _texts(self, items: Iterable[Any]) -> Iterator[str]:
        for item in items:
            yield str(self._finalized(item))

    def _sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        made = value[start:stop:step]
        self._budget.spend(made)
        return made

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own filter escapes HTML and sorts keys. Models were trained on neither."""
        around = sum(map(len, separators or ())) + 1
        self._budget.afford(self._budget.weigh(value) * around)
        self._budget.afford(indent if isinstance(indent, int) else len(indent or ""))
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self._budget.join(self._budget.pace(encoder.iterencode(value)))


class _Formatter(SandboxedFormatter):
    """`str.format`, each of whose fields may be as wide as it says."""

    def __init__(self, sandbox: _Sandbox, budget: Budget) -> None:
        super().__init__(sandbox)
        self._budget = budget

    def format_field(self, value: Any, format_spec: str) -> str:
        self._budget.afford(estimates.field(self._budget, value, format_spec))
        made: str = super().format_field(value, format_spec)
        self._budget.spend(made)
        return made


class _Hooks(NodeTransformer):
    """What Jinja compiles to plain Python goes through the sandbox's filters instead."""

    def __init__(self, sandbox: _Sandbox) -> None:
        self._sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("paced", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._through("concatenated", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return self._through("sliced", node.node, *(bound or none for bound in bounds))

    def _through(self, name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
        made = nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
        made.set_environment(self._sandbox)
        return made


class _Generation(Extension):
    """{% generation %}…{% endgeneration %} marks, for training, what the assistant says. Here it
    is its body and nothing more; in a scope of its own, as there."""

    tags = {"generation"}  # noqa: RUF012  # declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body, lineno=line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _refuse(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _clause(error: Exception) -> str:
    """What it says, on one line. Templates put what they like into their errors."""
    text = " ".join(str(error)[: 2 * _SHOWN].split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
