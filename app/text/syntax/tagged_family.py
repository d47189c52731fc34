"""What the families share that write calls between tags (`app/text/syntax/tagged_call.py`).

Knows: how their tags become a parser and a grammar. Must not know: any family's tags.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import CallSyntax, ChatFamily, Json, Spell
from app.text.syntax.pieces import Pieces
from app.text.syntax.reader import Reader, Wait
from app.text.syntax.tagged_call import CallTags, TaggedCalls
from app.text.syntax.tagged_syntax import tagged_syntax


class TaggedFamily(ChatFamily):
    call_tags: CallTags

    def body(self, reader: Reader, pieces: Pieces, tools: Sequence[Tool]) -> Wait[None]:
        calls = TaggedCalls(self.call_tags, tools)
        while (mark := (yield from reader.until(*calls.marks, take=pieces.say))) is not None:
            yield from calls.read(reader, pieces, mark)

    def syntax(self, tools: Sequence[Tool], spell: Spell, json: Json) -> CallSyntax | None:
        return tagged_syntax(self.call_tags, tools, spell, json)
