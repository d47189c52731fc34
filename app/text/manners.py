"""What a chat template can be told, found out by trying it.

Knows: a short conversation with a call in it, and what can be done where a template fails on it.
Must not know: Jinja, tokens, whose template it is.

Templates were written for whatever their makers sent. OpenAI's clients send less (a result without
the name of its function, a tool without a description), send more (two calls in a turn) and send
it otherwise (long ids). No two templates mind the same of it, and most say what they mind only by
failing. llama.cpp finds it out the same way (`common/chat.cpp`, its template capabilities).
"""

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from app.core.errors import AppError
from app.core.requests import CalledTool, Message, Tool

# A template that takes longer than this for all that it is tried with is taken as it is.
_SECONDS = 5.0

_SYSTEM = ("system", "developer")

_ID = "call_0123456789abcdef01234567"
_ASKED = Message(role="user", content="How warm is it?")
_TOLD = Message(role="system", content="Answer-in-rhymes.")
_TOOL = Tool(
    name="get_weather",
    description="Tells the weather.",
    parameters={
        "type": "object",
        "properties": {"place": {"type": "string", "description": "A place."}},
        "required": ["place"],
    },
)


class Render(Protocol):
    """`ChatTemplate.render`, as far as it is needed here."""

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        spelled: bool = False,
    ) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """system: system messages are rendered. developer: so are the developer's. offers: tools are.
    recounts: calls and their results are, beside tools; recounts_alone: without any. results: where
    calls are not, their results are.

    Where they are, but not as they come: listed: no tools must be an empty list of them. described:
    every tool needs a description. spelled: arguments must be text. brief: ids must be nine letters
    and digits. singly: a turn can hold one call.
    """

    system: bool = True
    developer: bool = True
    offers: bool = False
    recounts: bool = False
    recounts_alone: bool = False
    results: bool = False
    listed: bool = False
    described: bool = False
    spelled: bool = False
    brief: bool = False
    singly: bool = False

    def tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        """In OpenAI's shape, which is what templates expect."""
        given = [self._sent(tool) for tool in tools]
        return given if given or self.listed else None

    def _sent(self, tool: Tool) -> dict[str, Any]:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None or self.described:
            function["description"] = tool.description or ""
        function["parameters"] = dict(tool.parameters)
        return {"type": "function", "function": function}

    def turns(self, messages: Iterable[Message]) -> list[Message]:
        """The conversation, so that the template can render it."""
        turns = list(named(messages))
        if self.singly:
            turns = list(_singly(turns))
        if self.brief:
            turns = [_with_brief_ids(turn) for turn in turns]
        if not self.developer:
            turns = [
                replace(turn, role="system") if turn.role == "developer" else turn for turn in turns
            ]
        return turns if self.system else _without_system(turns)


def manners(render: Render) -> Manners:
    """Of the template behind `render`."""
    trial = _Trial(render)
    known = Manners()
    if not trial.shows(known, [_ASKED]) and trial.shows(listed := replace(known, listed=True)):
        known = listed
    known = replace(
        known,
        system=trial.shows(known, [_TOLD, _ASKED]) or not trial.shows(known, [_ASKED]),
        developer=trial.shows(known, [replace(_TOLD, role="developer"), _ASKED]),
    )
    known = replace(known, offers=trial.shows(known, [_ASKED], [_TOOL]))
    if known.offers and not trial.shows(known, [_ASKED], [replace(_TOOL, description=None)]):
        known = replace(known, described=True)
    return _recounting(trial, known)


def _recounting(trial: "_Trial", known: Manners) -> Manners:
    """How calls and their results are rendered, with as few changes to them as need be."""
    one = [_ASKED, *_round("1")]
    for changes in _subsets(("brief", "spelled")):
        tried = replace(known, **dict.fromkeys(changes, True))
        beside, alone = trial.shows(tried, one, [_TOOL]), trial.shows(tried, one)
        if not (beside and known.offers) and not alone:
            continue
        tried = replace(tried, recounts=beside and known.offers, recounts_alone=alone)
        two = [_ASKED, *_round("1", "2")]
        tools = [_TOOL] if tried.recounts else []
        alike = replace(tried, singly=True)
        if not trial.shows(tried, two, tools) and trial.shows(alike, two, tools):
            return alike
        return tried
    # a call that was said in so many words
    said = [_ASKED, Message(role="assistant", content=_place("1")), *_round("1")[1:]]
    return replace(known, results=trial.shows(known, said, [_TOOL] if known.offers else []))


class _Trial:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._until = time.monotonic() + _SECONDS

    def shows(
        self,
        manners: Manners,
        messages: Sequence[Message] = (_ASKED,),
        tools: Sequence[Tool] = (),
    ) -> bool:
        """Whether all that stands in them is in the prompt."""
        if time.monotonic() > self._until:
            return False
        turns = manners.turns(messages)
        try:
            text = self._render(turns, tools=manners.tools(tools), spelled=manners.spelled)
        except AppError:
            return False
        return all(word in text for word in _words(messages, tools))


def _words(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    for message in messages:
        yield message.content or ""
        for call in message.tool_calls:
            yield call.name
            yield _place(call.id)
    for tool in tools:
        yield tool.name
        yield "place"


def _round(*numbers: str) -> list[Message]:
    """A turn with as many calls, and their results."""
    ids = [_ID + number for number in numbers]
    calls = tuple(
        CalledTool(id=id, name=_TOOL.name, arguments=f'{{"place": "{_place(id)}"}}') for id in ids
    )
    results = (Message(role="tool", content=f"warm-{id[-1]}", tool_call_id=id) for id in ids)
    return [Message(role="assistant", content=None, tool_calls=calls), *results]


def _place(id: str) -> str:
    return f"Oslo{id[-1]}"


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The small ones first."""
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


def named(messages: Iterable[Message]) -> Iterator[Message]:
    """Results with the names of their functions, which OpenAI's clients leave out."""
    names: dict[str, str] = {}
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        name = names.get(message.tool_call_id or "")
        if message.role == "tool" and message.name is None and name is not None:
            yield replace(message, name=name)
        else:
            yield message


def _singly(turns: Sequence[Message]) -> Iterator[Message]:
    """Each call in a turn of its own, with its result behind it."""
    place = 0
    while place < len(turns):
        turn = turns[place]
        place += 1
        results: list[Message] = []
        while turn.tool_calls and place < len(turns) and turns[place].role == "tool":
            results.append(turns[place])
            place += 1
        answered = {result.tool_call_id: result for result in results}
        wanted = [call.id for call in turn.tool_calls]
        if len(wanted) < 2 or sorted(wanted) != sorted(map(str, answered)):
            yield from (turn, *results)
            continue
        for number, call in enumerate(turn.tool_calls):
            said = turn if number == 0 else replace(turn, content=None, reasoning=None)
            yield replace(said, tool_calls=(call,))
            yield answered[call.id]


def _with_brief_ids(turn: Message) -> Message:
    return replace(
        turn,
        tool_calls=tuple(replace(call, id=_brief(call.id)) for call in turn.tool_calls),
        tool_call_id=None if turn.tool_call_id is None else _brief(turn.tool_call_id),
    )


def _brief(id: str) -> str:
    """Always the same for the same id: a prompt that changes is not served by the cache."""
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]


def _without_system(turns: Sequence[Message]) -> list[Message]:
    """What the system says at first, the user says."""
    first = list(itertools.takewhile(lambda turn: turn.role in _SYSTEM, turns))
    if not first:
        return list(turns)
    rest = turns[len(first) :]
    told = "\n\n".join(turn.content or "" for turn in first)
    if not rest or rest[0].role != "user":
        return [Message(role="user", content=told), *rest]
    user, *others = rest
    return [replace(user, content=f"{told}\n\n{user.content or ''}"), *others]
