"""Every architecture's tiny configs, gathered from the tests that list them.

A test module of an architecture exports `CASES`. The suites that hold for all architectures
(tests/models/test_parity.py, tests/engine/test_architectures.py) take them from here, so that a
new architecture is one file in models/ and one in tests/models/.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """name: what is particular about it. config: what stands in config.json, so small that a model
    of it is made in milliseconds; where layers have a window, a small one. quantised: the kinds
    of weights in which it is tried too, by their names in tests/models/parity.py. transformers:
    whether that library has it, and computes the same. why: if not, a sentence for the table of
    `make parity`."""

    name: str
    config: Mapping[str, Any]
    quantised: tuple[str, ...] = ("affine-8",)
    transformers: bool = True
    why: str = ""

    @property
    def id(self) -> str:
        return f"{self.config['model_type']}-{self.name}"

    @property
    def vocab(self) -> int:
        """Its vocabulary size; of a multimodal one, its text part."""
        return self.config.get("text_config", self.config)["vocab_size"]


def cases() -> list[Case]:
    found: list[Case] = []
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        if "CASES" in file.read_text(encoding="utf-8"):
            module = importlib.import_module(f"tests.models.{file.stem}")
            found += vars(module).get("CASES", [])
    return found
