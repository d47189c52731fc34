"""Jinja, as chat templates expect it and as safe as it can be made.

Knows: jinja2, and the conventions that templates are written against: those of Hugging Face
transformers (`utils/chat_template_utils.py`, render_jinja_template). Must not know: where
templates come from, messages, token ids.

Templates come with models, and what they are given comes from strangers. The sandbox keeps both
away from Python; a deadline, looked at in every turn of every loop and at every call (which is how
macros recurse), keeps a render from going on for ever. What a hostile template can still do is ask
for much in one single step (`'x' * 10**10`): the operator chose the folder that it lies in, so
that is not defended against.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.core.errors import AppError, Kind

Clock = Callable[[], datetime]

RENDER_SECONDS = 5.0

# Where a render's deadline lies in its context: a name that no template can spell.
_DEADLINE = "the deadline"


class Template:
    """A compiled template; immutable."""

    def __init__(self, source: str, *, model: str, seconds: float = RENDER_SECONDS) -> None:
        """model: whose template it is. seconds: how long one render may take.

        Raises AppError(MODEL_FILES) when the source cannot be compiled.
        """
        self.source = source
        self._seconds = seconds
        try:
            self._compiled = _Sandbox().from_string(source)
        except Exception as error:  # Jinja's, or Python's about what Jinja made of it
            line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            message = f"the chat template of {model} is broken{line}: {error}"
            raise AppError(Kind.MODEL_FILES, message) from error

    def render(self, context: Mapping[str, Any], *, now: Clock) -> str:
        """now: the clock of templates that tell the model what day it is.

        Raises AppError(INVALID): in the template's own words when it refuses the context.
        """

        def strftime_now(form: str) -> str:
            return now().strftime(form)

        given = {"strftime_now": strftime_now, **context, _DEADLINE: _Deadline(self._seconds)}
        try:
            return self._compiled.render(given)
        except _Refusal as refusal:
            raise AppError(Kind.INVALID, str(refusal), param="messages") from refusal
        except Exception as error:
            # A program that we did not write may fail in every way there is; mostly because the
            # conversation is not of the shape that it was written for.
            message = f"the model's chat template cannot render this conversation: {error}"
            raise AppError(Kind.INVALID, message, param="messages") from error


class _Refusal(TemplateError):
    """The template called raise_exception."""


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise TimeoutError(f"it takes longer than {self._seconds:g} seconds")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers, with the deadline looked at."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        # Jinja's stubs know only the filters and globals that are there from the beginning.
        filters, names = cast("dict[str, Any]", self.filters), cast("dict[str, Any]", self.globals)
        filters["tojson"] = _to_json
        filters["paced"] = _paced
        names["raise_exception"] = _refuse

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            paced = nodes.Filter(loop.iter, "paced", [], [], None, None, lineno=loop.lineno)
            loop.iter = paced.set_environment(self)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        context[_DEADLINE].check()
        return super().call(context, obj, *args, **kwargs)


@pass_context
def _paced(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    deadline: _Deadline = context[_DEADLINE]
    for item in items:
        deadline.check()
        yield item


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys. Models were trained on neither."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
