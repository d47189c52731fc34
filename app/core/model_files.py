"""The paths and the parsed JSON files of a model.

Knows: paths, parsed JSON. Must not know: tensors, tokenizers, chat templates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, ErrorKind

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files of an installed model. All JSON files have been parsed.

    shards: the safetensors files, sorted. config, generation_config, tokenizer_config: parsed JSON
    objects, empty if the file is missing (config is never missing). chat_template: the text of a
    separate chat_template.jinja, which takes precedence over the template in tokenizer_config.
    created: the creation time as Unix time.

    system_prompt: the system prompt for conversations that have none. first_messages: the role and
    content of messages inserted at the start of every conversation. license: the text of the
    license. parent: the name of the model that this one was created from. recommended_context: the
    default context length recommended by the model's authors; None means the model's full context
    length. tokenizer_vocab_size: the highest token ID of the tokenizer plus one; None if unknown.
    weight_bytes: the size of all tensors in bytes. weights_digest: a digest that changes when a
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
    first_messages: tuple[tuple[str, str], ...] = ()
    license: str = ""
    parent: str = ""
    recommended_context: int | None = None
    tokenizer_vocab_size: int | None = None
    weight_bytes: int = 0
    weights_digest: str = ""

    def read_token_ids(self, field: str) -> Iterator[frozenset[int]]:
        """Yields the token IDs in a field (for example eos_token_id), one set per file that
        contains any: first from generation_config.json, then from config.json. -1 and null mean
        that there is no such token. Raises AppError(MODEL_FILES) for a value that is neither a
        token ID nor a list of token IDs."""
        for name, source in (
            ("generation_config.json", self.generation_config),
            ("config.json", self.config),
        ):
            value: Any = source.get(field)
            listed = cast("list[Any]", value if isinstance(value, list) else [value])
            ids = [id for id in listed if id is not None and id != -1]
            if any(not isinstance(id, int) or isinstance(id, bool) or id < 0 for id in ids):
                message = f"{field} in {name} of {self.path} is {value!r}: expected token IDs"
                raise AppError(ErrorKind.MODEL_FILES, message)
            if ids:
                yield frozenset(ids)

    @property
    def context_length(self) -> int:
        """The maximum number of positions of the model (max_position_embeddings)."""
        return int(self.config["max_position_embeddings"])

    def resolve_context_length(self, requested: int | None) -> int:
        """Returns the maximum number of positions in one sequence. requested: the value of
        Settings.context."""
        return min(
            requested or self.recommended_context or self.context_length, self.context_length
        )

    def describe_excess(self, requested: int | None) -> str | None:
        """Returns a warning if the requested context length exceeds that of the model."""
        if requested is None or requested <= self.context_length:
            return None
        return (
            f"--context {requested} exceeds the context length of {self.name}, which is "
            f"{self.context_length}"
        )

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the model's embedding layer and logits."""
        return int(self.config["vocab_size"])

    @property
    def sampleable_vocab_size(self) -> int:
        """The number of token IDs that may be sampled or biased, counted from 0. These IDs exist in
        both the model and the tokenizer. Models pad their vocabulary with untrained tokens, and a
        tokenizer may have added tokens for which the model has no embeddings."""
        return (
            self.vocab_size
            if self.tokenizer_vocab_size is None
            else min(self.vocab_size, self.tokenizer_vocab_size)
        )
