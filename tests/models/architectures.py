"""Every architecture's tiny configs, gathered from the tests that list them.

A test module of an architecture exports `CASES`. The suites that run for all architectures
(tests/models/test_parity.py, tests/engine/test_architectures.py) collect them with `cases`, so a
new architecture is one file in models/ and one in tests/models/.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """name: the property that this case tests. config: the content of config.json, so small that
    the model is built in milliseconds; layers with a window have a small one. quantized: the
    quantized formats that are also tested, by their names in tests/models/parity.py.
    transformers: whether that library has the architecture and computes the same logits. why: if
    not, a sentence for the table of `make parity`."""

    name: str
    config: Mapping[str, Any]
    quantized: tuple[str, ...] = ("affine-8",)
    transformers: bool = True
    why: str = ""

    @property
    def id(self) -> str:
        return f"{self.config['model_type']}-{self.name}"

    @property
    def vocab(self) -> int:
        """Vocabulary size; for a multimodal model, that of its text part."""
        return self.config.get("text_config", self.config)["vocab_size"]


def cases() -> list[Case]:
    found: list[Case] = []
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        if "CASES" in file.read_text(encoding="utf-8"):
            module = importlib.import_module(f"tests.models.{file.stem}")
            found += vars(module).get("CASES", [])
    return found
