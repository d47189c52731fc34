"""Outputs of real models with their expected parts: the rows of output_parsing.

SOURCE.md in that folder describes each source, and which of its expectations apply.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.requests import Tool

ANY = Tool(name="any", description=None, parameters={"type": "object"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """content, reasoning, calls: None where the source has no expectation. template: source of the
    chat template. prompt: its end. in_reasoning: whether the prompt ends within reasoning; None
    lets the family decide. tagged: reasoning is parsed; else its tags stay in the content."""

    id: str
    output: str
    tools: tuple[Tool, ...]
    template: str | None = None
    prompt: str = ""
    in_reasoning: bool | None = None
    tagged: bool = True
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[Mapping[str, Any], ...] | None = None


def parse_tools(tool_list: Iterable[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Converts tools in OpenAI's format."""
    return tuple(
        Tool(
            name=tool["function"]["name"],
            description=tool["function"].get("description"),
            parameters=tool["function"].get("parameters") or {"type": "object"},
        )
        for tool in tool_list or ()
    )


def template(shared: Path, name: str) -> str:
    """The source of a real chat template, by file name."""
    return templates(shared)[name]


def templates(shared: Path) -> dict[str, str]:
    """The sources of all real chat templates, by file name."""
    files = sorted((shared / "chat_templates").glob("templates*/*.jinja"))
    return {file.name: file.read_text("utf-8") for file in files}


def roundtrip(shared: Path, *names: str) -> list[Row]:
    """Calls as these templates (file names) render them in assistant turns."""
    tool_list = (shared / "output_parsing" / "tools_roundtrip.json").read_text("utf-8")
    sources = templates(shared)
    return [
        Row(
            id=row["id"],
            template=sources[row["template"]],
            prompt=row["prompt_suffix"],
            output=row["output"],
            tools=parse_tools(json.loads(tool_list)),
            calls=tuple(row["expect"]["tool_calls"]),
        )
        for row in _lines(shared, "roundtrip.jsonl")
        if row["template"] in names
    ]


def llamacpp(shared: Path, *names: str | None) -> list[Row]:
    """llama.cpp's expectations for outputs of these templates; None: rows without a template."""
    sources = templates(shared)
    return [
        Row(
            id=row["id"],
            template=sources.get(row["template"] or ""),
            prompt=row["prompt_suffix"],
            output=row["output"],
            tools=parse_tools(row["tools"]),
            tagged=row["reasoning_format"] != "none" or bool(row["expect"]["reasoning_content"]),
            content=row["expect"]["content"],
            reasoning=row["expect"]["reasoning_content"],
            calls=tuple(row["expect"]["tool_calls"]),
        )
        for row in _lines(shared, "llamacpp.jsonl")
        if row["template"] in names
    ]


def ollama(shared: Path, *families: str, name: str | None = None) -> list[Row]:
    """ollama's expectations. families: prefixes of its family names. name: the file of the
    template for these outputs. ollama parses calls with or without tools."""
    return [
        Row(
            id=row["id"],
            template=None if name is None else template(shared, name),
            output=row["output"],
            tools=parse_tools(row["tools"]) or (ANY,),
            in_reasoning=row.get("thinking_enabled", False),
            content=row["expect"].get("content"),
            reasoning=row["expect"].get("reasoning_content"),
            calls=_calls(row["expect"].get("tool_calls")),
        )
        for row in _lines(shared, "ollama.jsonl")
        if row["family"].startswith(families)
    ]


def mlx_lm(shared: Path, *parsers: str) -> list[Row]:
    """mlx-lm's expectations for the text between a start and an end marker."""
    return [
        Row(
            id=row["id"],
            output=f"{row['start_marker'] or ''}{row['inner_text']}{row['end_marker'] or ''}",
            tools=parse_tools(row["tools"]) or (ANY,),
            in_reasoning=False,
            calls=_calls(row["expect"]),
        )
        for row in _lines(shared, "mlx_lm.jsonl")
        if row["parser"] in parsers
    ]


def select_rows(rows: Iterable[Row], excluded: Mapping[str, str]) -> Iterator[Row]:
    """The rows that are not excluded. excluded: id → reason; all ids must be among the rows."""
    ids: set[str] = set()
    for row in rows:
        ids.add(row.id)
        if row.id not in excluded:
            yield row
    assert ids, "no rows"
    assert set(excluded) <= ids, f"not among the rows: {set(excluded) - ids}"


def _lines(shared: Path, file: str) -> Iterator[dict[str, Any]]:
    with (shared / "output_parsing" / file).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _calls(expected: Any) -> tuple[Mapping[str, Any], ...] | None:
    if expected is None:
        return None
    return tuple(expected) if isinstance(expected, list) else (expected,)
