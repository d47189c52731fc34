"""Questions of the Berkeley Function Calling Leaderboard (Patil et al. 2025), as requests.

Their schemas use Python's types, and their functions have dots in their names. Both are converted
to OpenAI's format, as the leaderboard does for OpenAI's models (convert_to_tool in
bfcl_eval/model_handler/utils.py of ShishirPatil/gorilla).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KINDS = ("simple_python", "multiple", "parallel")

_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def questions(traces: Path) -> Iterator[dict[str, Any]]:
    """Every question, as fields of a request. Only some of them need several calls."""
    for kind in _KINDS:
        for line in (traces / f"BFCL_v4_{kind}.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            [messages] = row["question"]
            yield {
                "messages": messages,
                "tools": [_tool(one) for one in row["function"]],
                "parallel_tool_calls": kind == "parallel",
            }


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": function["name"].replace(".", "_"),
            "description": function["description"],
            "parameters": _schema(function["parameters"]),
        },
    }


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    converted = dict(schema)
    kind = converted.pop("type")
    if kind != "any":
        converted["type"] = _TYPES.get(kind, kind)
    if "properties" in converted:
        converted["properties"] = {
            name: _schema(one) for name, one in converted["properties"].items()
        }
    if "items" in converted:
        converted["items"] = _schema(converted["items"])
    return converted
