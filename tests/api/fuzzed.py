"""openapi.yaml as a fuzzer needs it."""

from pathlib import Path
from typing import Any

import yaml


def document(model: str, vocab: int) -> Any:
    """As it stands in the repository, but for what a schema cannot say or cannot know: which model
    is served, how large its vocabulary is, and that a text is JSON."""
    text = (Path(__file__).parents[2] / "openapi.yaml").read_text("utf-8")
    read = yaml.safe_load(text)
    schemas = read["components"]["schemas"]
    schemas["ModelId"]["enum"] = [model]
    schemas["TokenIds"]["items"]["maximum"] = vocab - 1
    schemas["ToolCall"]["properties"]["function"]["properties"]["arguments"]["enum"] = ["", "{}"]
    return read
