"""Where a model lies and what its JSON files say.

Knows: paths and parsed JSON. Must not know: tensors, tokenizers, templates' meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model that was found and whose JSON files could be read.

    shards: safetensors files, sorted. config, generation_config, tokenizer_config: parsed JSON
    objects, empty when the file is not there (config always is). template: the text of a separate
    chat_template.jinja, which wins over the template inside tokenizer_config. created: Unix time.
    """

    name: str
    path: Path
    config: Json
    shards: tuple[Path, ...]
    tokenizer: Path
    tokenizer_config: Json
    generation_config: Json
    template: str | None
    created: int

    @property
    def context_length(self) -> int:
        """Positions the model was made for."""
        return int(self.config["max_position_embeddings"])

    @property
    def vocab_size(self) -> int:
        """Ids that the model scores; a tokenizer may have fewer, never more."""
        return int(self.config["vocab_size"])
