"""What the families share that write calls between tags (`app/text/syntax/tagged_call.py`).

Knows: how their tags become a parser and a grammar. Must not know: any family's tags.
"""

from collections.abc import Sequence

from app.core.requests import Tool
from app.text.family import ChatFamily, MakeJsonSchema, MakeLiteral, ToolCallGrammar
from app.text.syntax.pieces import OutputBuilder
from app.text.syntax.reader import Reader, Resumable
from app.text.syntax.tagged_call import CallTags, TaggedCallParser
from app.text.syntax.tagged_syntax import build_tagged_grammar


class TaggedFamily(ChatFamily):
    call_tags: CallTags

    def parse_tool_calls(
        self, reader: Reader, output: OutputBuilder, tools: Sequence[Tool]
    ) -> Resumable[None]:
        calls = TaggedCallParser(self.call_tags, tools)
        while (
            mark := (yield from reader.read_until(*calls.start_markers, on_text=output.add_content))
        ) is not None:
            yield from calls.parse(reader, output, mark)

    def build_tool_call_grammar(
        self, tools: Sequence[Tool], literal: MakeLiteral, json_schema: MakeJsonSchema
    ) -> ToolCallGrammar | None:
        return build_tagged_grammar(self.call_tags, tools, literal, json_schema)
