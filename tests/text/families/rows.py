"""Outputs of real models, and what is in them: the rows of output_parsing.

What each source is, and how far its expectations are law, stands in that folder's SOURCE.md.
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
    """content, reasoning, calls: None where the source does not say. template: source of the chat
    template. prompt: the end of it. in_reasoning: whether it ends within reasoning; None to ask the
    family. tagged: reasoning is to be split off; else its tags are expected in the content."""

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


def tools_of(declared: Iterable[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """OpenAI's tools → ours."""
    return tuple(
        Tool(
            name=tool["function"]["name"],
            description=tool["function"].get("description"),
            parameters=tool["function"].get("parameters") or {"type": "object"},
        )
        for tool in declared or ()
    )


def template(shared: Path, name: str) -> str:
    """The source of a real chat template, by the name of its file."""
    return templates(shared)[name]


def templates(shared: Path) -> dict[str, str]:
    """Of all real chat templates, by the names of their files."""
    files = sorted((shared / "chat_templates").glob("templates*/*.jinja"))
    return {file.name: file.read_text("utf-8") for file in files}


def roundtrip(shared: Path, *names: str) -> list[Row]:
    """Calls as these templates, by the names of their files, render them in assistant turns."""
    declared = (shared / "output_parsing" / "tools_roundtrip.json").read_text("utf-8")
    sources = templates(shared)
    return [
        Row(
            id=row["id"],
            template=sources[row["template"]],
            prompt=row["prompt_suffix"],
            output=row["output"],
            tools=tools_of(json.loads(declared)),
            calls=tuple(row["expect"]["tool_calls"]),
        )
        for row in _lines(shared, "roundtrip.jsonl")
        if row["template"] in names
    ]


def llamacpp(shared: Path, *names: str | None) -> list[Row]:
    """llama.cpp's expectations for outputs of these templates; None: of rows without one."""
    sources = templates(shared)
    return [
        Row(
            id=row["id"],
            template=sources.get(row["template"] or ""),
            prompt=row["prompt_suffix"],
            output=row["output"],
            tools=tools_of(row["tools"]),
            tagged=row["reasoning_format"] != "none" or bool(row["expect"]["reasoning_content"]),
            content=row["expect"]["content"],
            reasoning=row["expect"]["reasoning_content"],
            calls=tuple(row["expect"]["tool_calls"]),
        )
        for row in _lines(shared, "llamacpp.jsonl")
        if row["template"] in names
    ]


def ollama(shared: Path, *families: str, name: str | None = None) -> list[Row]:
    """ollama's expectations. families: how the names that it gives them begin. name: the file of
    a template that such outputs belong to. It reads calls whether or not there are tools."""
    return [
        Row(
            id=row["id"],
            template=None if name is None else template(shared, name),
            output=row["output"],
            tools=tools_of(row["tools"]) or (ANY,),
            in_reasoning=row.get("thinking_enabled", False),
            content=row["expect"].get("content"),
            reasoning=row["expect"].get("reasoning_content"),
            calls=_calls(row["expect"].get("tool_calls")),
        )
        for row in _lines(shared, "ollama.jsonl")
        if row["family"].startswith(families)
    ]


def mlx_lm(shared: Path, *parsers: str) -> list[Row]:
    """mlx-lm's expectations of what stands between a start and an end marker."""
    return [
        Row(
            id=row["id"],
            output=f"{row['start_marker'] or ''}{row['inner_text']}{row['end_marker'] or ''}",
            tools=tools_of(row["tools"]) or (ANY,),
            in_reasoning=False,
            calls=_calls(row["expect"]),
        )
        for row in _lines(shared, "mlx_lm.jsonl")
        if row["parser"] in parsers
    ]


def law(rows: Iterable[Row], left_out: Mapping[str, str]) -> Iterator[Row]:
    """The rows that are not left out. left_out: id → why it is no law; all must be among them."""
    ids: set[str] = set()
    for row in rows:
        ids.add(row.id)
        if row.id not in left_out:
            yield row
    assert ids, "there are no such rows"
    assert set(left_out) <= ids, f"not among the rows: {set(left_out) - ids}"


def _lines(shared: Path, file: str) -> Iterator[dict[str, Any]]:
    with (shared / "output_parsing" / file).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _calls(expected: Any) -> tuple[Mapping[str, Any], ...] | None:
    if expected is None:
        return None
    return tuple(expected) if isinstance(expected, list) else (expected,)
