"""Where a model lies and what its JSON files say.

Knows: paths and parsed JSON. Must not know: tensors, tokenizers, templates' meaning.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, ErrorKind

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model that was found and whose JSON files could be read.

    shards: safetensors files, sorted. config, generation_config, tokenizer_config: parsed JSON
    objects, empty when the file is not there (config always is). chat_template: the text of a
    separate chat_template.jinja, which wins over the template inside tokenizer_config. created:
    Unix time.

    system_prompt: what the model is told at first, where a conversation does not say.
    recommended_context: positions that its makers want served, where nobody asks; None is as many
    as it was made for. tokenizer_vocab_size: the tokenizer's highest id plus one; None where that
    is not known. weight_bytes: bytes of all tensors. weights_digest: a digest that changes when a
    shard is replaced.
    """

    name: str
    path: Path
    config: Json
    shards: tuple[Path, ...]
    tokenizer_path: Path
    tokenizer_config: Json
    generation_config: Json
    chat_template: str | None
    created: int
    system_prompt: str | None = None
    recommended_context: int | None = None
    tokenizer_vocab_size: int | None = None
    weight_bytes: int = 0
    weights_digest: str = ""

    def check_model_name(self, requested: str) -> None:
        """Raises AppError(MODEL_NOT_FOUND) if a request asks for another model. Ollama's clients
        write out the tag that a name without one stands for."""
        if requested.removesuffix(":latest") != self.name:
            raise AppError(
                ErrorKind.MODEL_NOT_FOUND,
                f"the model {requested[:200]!r} does not exist: this server serves {self.name!r}",
                param="model",
            )

    def read_token_ids(self, field: str) -> Iterator[frozenset[int]]:
        """The ids that a field such as eos_token_id names, from each file that names any:
        generation_config.json, then config.json. -1 and null stand for none. Raises
        AppError(MODEL_FILES) for what is neither an id nor a list of ids."""
        for name, source in (
            ("generation_config.json", self.generation_config),
            ("config.json", self.config),
        ):
            value: Any = source.get(field)
            listed = cast("list[Any]", value if isinstance(value, list) else [value])
            ids = [id for id in listed if id is not None and id != -1]
            if any(not isinstance(id, int) or isinstance(id, bool) or id < 0 for id in ids):
                message = f"{field} in {name} of {self.path} is {value!r}: expected token ids"
                raise AppError(ErrorKind.MODEL_FILES, message)
            if ids:
                yield frozenset(ids)

    @property
    def context_length(self) -> int:
        """Positions the model was made for."""
        return int(self.config["max_position_embeddings"])

    def resolve_context_length(self, requested: int | None) -> int:
        """Positions that one sequence may have. requested: Settings.context."""
        return min(
            requested or self.recommended_context or self.context_length, self.context_length
        )

    @property
    def vocab_size(self) -> int:
        """Ids that the model has rows for, in its embeddings and in its scores."""
        return int(self.config["vocab_size"])

    @property
    def sampleable_vocab_size(self) -> int:
        """Ids that may be sampled or biased, 0 to this minus one: those that the model scores and
        the tokenizer has. Models round their rows up, and the rest was never trained; a tokenizer
        may have been given tokens that the model has no rows for."""
        return (
            self.vocab_size
            if self.tokenizer_vocab_size is None
            else min(self.vocab_size, self.tokenizer_vocab_size)
        )
