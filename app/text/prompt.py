"""Requests → prompts: the text, or the ids, that a model goes on from, and how its answer is read.

Knows: the model's template and family, tools, reasoning, what fills in. Must not know: the context
length, the engine, sampling.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from app.core.errors import AppError, Kind, quote_client
from app.core.files import ModelFiles
from app.core.requests import Conversation, GenerateRequest, Grammar, Message, NamedTool, Tool
from app.core.workers import CancelToken
from app.text.chat import ChatTemplate
from app.text.constraint import Asked, Turn, constraint
from app.text.family import ChatFamily, Tags, family_of
from app.text.history import recounted
from app.text.manners import manners, named
from app.text.plain_calls import Plain, told
from app.text.syntax.pieces import Splitter
from app.text.thinking import check_budget, options
from app.text.tokenizer import Tokenizer

_SYSTEM = ("system", "developer")

_NONE = re.compile(r"""(['"])none\1""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A conversation as the model gets it. text: the prompt. add_special: whether it is encoded
    with the tokens that begin a text. grammar: what the answer follows. family, tools, tags,
    opened: how it is read; see `ChatFamily.split`. shown: special tokens that are part of that."""

    text: str
    add_special: bool
    grammar: Grammar | None
    family: ChatFamily
    tools: tuple[Tool, ...]
    tags: Tags | None
    opened: bool
    shown: frozenset[int]

    def splitter(self) -> Splitter:
        return self.family.split(tools=self.tools, tags=self.tags, opened=self.opened)


class Conversations:
    """How one model is talked to; immutable."""

    def __init__(self, files: ModelFiles, tokenizer: Tokenizer) -> None:
        """Raises AppError(MODEL_FILES) when the template is broken."""
        self._system = files.system
        self._tokenizer = tokenizer
        self._template = ChatTemplate(files)
        source = self._template.source(tools=True)
        self._family = family_of(source) or Plain()
        self._plain = Plain(self._family.restart)
        self._tags = self._family.tags(source)
        self._manners = manners(self._template.render)

    def write(
        self,
        request: GenerateRequest,
        conversation: Conversation,
        token: CancelToken | None = None,
    ) -> Written:
        """Raises AppError(INVALID). Cancelled when `token` is."""
        tools = () if request.tool_choice == "none" else request.tools
        _check_choice(request)
        reasons = self._tags is not None
        check_budget(request.thinking, reasons=reasons)
        messages = self._with_system(conversation.messages)
        text, offered = self._render(request, messages, tools, token)
        turn = self._turn(request, text)
        asked = Asked(
            grammar=request.grammar,
            tools=tools,
            choice=request.tool_choice,
            parallel=request.parallel_tool_calls,
        )
        # whoever was told of tools in words answers in those words
        reader = self._family if offered or not tools else self._plain
        follows = constraint(asked, turn, reader, self._tokenizer.added_id)
        family = follows.family
        return Written(
            text=text,
            add_special=not self._template.complete,
            grammar=follows.grammar,
            family=family,
            tools=tools,
            tags=turn.tags,
            opened=turn.opened,
            shown=self._shown(family if tools else None, turn.tags),
        )

    def _render(
        self,
        request: GenerateRequest,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        token: CancelToken | None,
    ) -> tuple[str, bool]:
        """The prompt, and whether the tools were offered as the template does it: what it has no
        words for, or fails on, is told in ours. Raises its refusal of what it refuses anyway."""
        manners = self._manners
        calls = any(message.tool_calls or message.role == "tool" for message in messages)
        recounts = manners.recounts if tools else manners.recounts_alone
        offered = manners.offers and bool(tools)
        messages = list(named(messages))
        if offered and calls and not recounts:
            messages = recounted(messages, self._family, results=manners.results)
        elif (tools and not offered) or (calls and not recounts):
            messages = told(messages, tools)
        try:
            return self._rendered(request, messages, tools if offered else (), token), offered
        except AppError:
            if not tools and not calls:
                raise
            with suppress(AppError):
                return self._rendered(request, told(messages, tools), (), token), False
            raise

    def _rendered(
        self,
        request: GenerateRequest,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        token: CancelToken | None,
    ) -> str:
        template, manners = self._template, self._manners
        variables = options(
            request.thinking,
            template.variables(tools=bool(tools)),
            reasons=self._tags is not None,
            knows_none=_NONE.search(template.source(tools=bool(tools))) is not None,
        )
        return template.render(
            manners.turns(messages),
            tools=manners.tools(tools),
            spelled=manners.spelled,
            token=token,
            **{**variables, **request.template_options},
        )

    def _turn(self, request: GenerateRequest, text: str) -> Turn:
        tags = self._tags
        if tags is None or text.rstrip().endswith(tags.close):
            return Turn(tags=None)
        opened = self._family.opened(text, tags)
        return Turn(tags=tags, opened=opened, budget=request.thinking.budget)

    def _shown(self, calls: ChatFamily | None, tags: Tags | None) -> frozenset[int]:
        """Special tokens that mark what is read out of the answer."""
        texts = () if calls is None and tags is None else self._family.markers
        ids = (self._tokenizer.token_id(text) for text in texts)
        return frozenset(id for id in ids if id is not None)

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        """What the model is told at first, unless the conversation tells it."""
        if self._system is None or any(message.role in _SYSTEM for message in messages):
            return messages
        return (Message(role="system", content=self._system), *messages)


def _check_choice(request: GenerateRequest) -> None:
    choice = request.tool_choice
    if isinstance(choice, NamedTool) and all(t.name != choice.name for t in request.tools):
        message = f"tool_choice names {quote_client(repr(choice.name))}, which is not in tools"
        raise AppError(Kind.INVALID, message, param="tool_choice")
