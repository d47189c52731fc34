"""The paths and the parsed JSON files of a model, and the defaults of its requests: those that its
authors recommend, and those that an administrator may change while the server runs.

Knows: paths, parsed JSON, the keys of generation_config.json, as defined by transformers'
GenerationConfig, and three Ollama parameters: presence_penalty, frequency_penalty, repeat_last_n.
Must not know: tensors, tokenizers, chat templates, the state of the model.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.sampling_params import SAMPLING_KNOBS, SamplingValue

Json = Mapping[str, Any]

# keys that have no effect in greedy decoding
RANDOM_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token of a tokenizer that is recognized in text before it is split. The fields match
    `added_tokens` in tokenizer.json."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files of an installed model. All JSON files have been parsed.

    shards: the safetensors files, sorted. config, generation_config, tokenizer_config: parsed JSON
    objects, empty if the file is missing (config is never missing). chat_template: the text of a
    separate file, which takes precedence over the template in tokenizer_config; chat_template_file
    is its name. named_templates: further templates by name. created: the creation time as Unix
    time. processor_config: the settings of the image processor: preprocessor_config.json, and over
    it the `image_processor` of processor_config.json.

    system_prompt: the system prompt for conversations that have none. first_messages: the role and
    content of messages inserted at the start of every conversation. license: the text of the
    license. parent: the name of the model that this one was created from. recommended_context: the
    default context length recommended by the model's authors; None means the model's full context
    length. tokenizer_vocab_size: the highest token ID of the tokenizer plus one; None if unknown.
    added_tokens: the tokens of other files that are missing in tokenizer.json.
    weight_bytes: the size of all tensors in bytes. weights_digest: a digest that changes when a
    shard is replaced. is_encoder: whether the model computes hidden states only, and generates no
    text. num_scores: the number of scores of its classification head, or 0. max_positions: the
    context length of the architecture. `app.engine.model_info.complete_config` sets these.
    projector_path: the file with the vision tower of a model in GGUF, which may be a shard, if it
    has one. adapter_path: the LoRA adapter that is a part of the model and applies to all requests,
    if it has one.
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
    added_tokens: tuple[AddedToken, ...] = ()
    chat_template_file: str = "chat_template.jinja"
    named_templates: Mapping[str, str] = field(default_factory=dict[str, str])
    processor_config: Json = field(default_factory=dict[str, Any])
    weight_bytes: int = 0
    weights_digest: str = ""
    is_encoder: bool = False
    num_scores: int = 0
    max_positions: int | None = None
    projector_path: Path | None = None
    adapter_path: Path | None = None

    def read_tokenizer(self) -> str:
        """Returns the text of tokenizer.json with `added_tokens`, and without a byte order mark.
        Raises OSError and ValueError for a file that cannot be read."""
        text = self.tokenizer_path.read_text("utf-8-sig")
        if not self.added_tokens:
            return text
        parsed: dict[str, Any] = json.loads(text)
        added: list[Any] = parsed.get("added_tokens") or []
        parsed["added_tokens"] = [*added, *map(asdict, self.added_tokens)]
        return json.dumps(parsed, ensure_ascii=False)

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
        """The maximum number of positions of the model: max_position_embeddings, unless the
        architecture uses fewer."""
        return self.max_positions or int(self.config["max_position_embeddings"])

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


def read_embedding_modules(folder: Path) -> Sequence[tuple[str, object]]:
    """Returns the kind and the path of each module that sentence-transformers applies, in order,
    from modules.json. The result is empty if the file is missing or invalid."""
    try:
        parsed: Any = json.loads((folder / "modules.json").read_text("utf-8"))
    except (OSError, ValueError):
        return []
    listed = cast("list[Any]", parsed if isinstance(parsed, list) else [])
    modules = [cast(Json, module) for module in listed if isinstance(module, dict)]
    return [(str(one.get("type")).rpartition(".")[2], one.get("path")) for one in modules]


def merge_processor_config(preprocessor: Json | None, processor: Json | None) -> Json:
    """Returns the settings of the image processor. preprocessor: preprocessor_config.json.
    processor: processor_config.json, which newer versions of transformers write, and which takes
    precedence."""
    nested: Any = (processor or {}).get("image_processor")
    return {**(preprocessor or {}), **(cast(Json, nested) if isinstance(nested, dict) else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The defaults of a model. sampling: fields of `SamplingParams` by name. max_tokens: the
    maximum number of output tokens; None uses the rest of the context. stop_strings: strings that
    end the output."""

    sampling: Mapping[str, SamplingValue] = field(default_factory=dict[str, SamplingValue])
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()


def read_generation_defaults(files: ModelFiles) -> GenerationDefaults:
    """Reads the model's defaults. They override the server's defaults, and requests override them.
    Unknown keys are ignored, and null is treated as missing.

    Raises AppError(MODEL_FILES) for an invalid value. The error names the file and the key.
    """
    config = files.generation_config
    try:
        return GenerationDefaults(
            sampling=_read_sampling(config),
            max_tokens=_read_max_tokens(config),
            stop_strings=_read_stop_strings(config),
        )
    except _InvalidValue as error:
        message = f"generation_config.json of {files.path}: {error}"
        raise AppError(ErrorKind.MODEL_FILES, message) from error


class _InvalidValue(ValueError):
    def __init__(self, key: str, value: Any, expected: str) -> None:
        text = repr(value)
        super().__init__(f"{key} is {text[:80]}, but must be {expected}")


def _read_sampling(config: Json) -> Mapping[str, SamplingValue]:
    """Reads the sampling parameters. `do_sample: false` selects greedy decoding; penalties still
    apply."""
    found: dict[str, SamplingValue] = {}
    for knob in SAMPLING_KNOBS:
        value: Any = config.get(knob.name)
        if value is None:
            continue
        if knob.kind is int:
            if not _is_integer(value) or not knob.low <= value <= knob.trusted_high:
                raise _InvalidValue(knob.name, value, f"an integer of {knob.low:.0f} or more")
            found[knob.name] = value
        else:
            if not _is_number(value) or not knob.low <= value <= knob.trusted_high:
                range_ = f"a number from {knob.low:g} to {knob.trusted_high:g}"
                raise _InvalidValue(knob.name, value, range_)
            found[knob.name] = float(value)
        if found[knob.name] == knob.off:
            found[knob.name] = knob.default
    do_sample: Any = config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise _InvalidValue("do_sample", do_sample, "true or false")
    if do_sample is False:
        found = {key: value for key, value in found.items() if key not in RANDOM_SAMPLING_KEYS}
        found["temperature"] = 0.0
    return found


def _read_max_tokens(config: Json) -> int | None:
    """Returns the maximum number of output tokens. Returns None for -1 and -2, which mean in Ollama
    that only the context limits the output."""
    value: Any = config.get("max_new_tokens")
    if value is None or value in (-1, -2):
        return None
    if not _is_integer(value) or value < 1:
        raise _InvalidValue("max_new_tokens", value, "an integer of 1 or more")
    return value


def _read_stop_strings(config: Json) -> tuple[str, ...]:
    value: Any = config.get("stop_strings")
    if value is None:
        return ()
    texts = cast("list[Any]", value if isinstance(value, list) else [value])
    if not all(isinstance(text, str) and text for text in texts):
        raise _InvalidValue("stop_strings", value, "a string or a list of strings")
    return tuple(dict.fromkeys(texts))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults:
    """The defaults of one model. If a value is None, the value from the settings or from the model
    itself applies.

    name: the name under which the model is served. aliases: additional names for requests. system:
    the system prompt of conversations that have none. context: the context length in tokens.
    keep_alive: the number of seconds that the model stays loaded without requests; math.inf means
    forever. max_tokens: the maximum number of output tokens. sampling: fields of `SamplingParams`
    by name. Requests override max_tokens, sampling and system.
    """

    name: str
    aliases: tuple[str, ...] = ()
    system: str | None = None
    context: int | None = None
    keep_alive: float | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, float | int] = field(default_factory=dict[str, float | int])

    @property
    def is_empty(self) -> bool:
        return self == ModelDefaults(name=self.name)

    def apply(self, files: ModelFiles) -> ModelFiles:
        """Returns the files with the system prompt and the generation defaults."""
        config: dict[str, Any] = {**files.generation_config, **self.sampling}
        if any(name in self.sampling for name in RANDOM_SAMPLING_KEYS):
            config.pop("do_sample", None)  # false would override the temperature
        if self.max_tokens is not None:
            config["max_new_tokens"] = self.max_tokens
        system = files.system_prompt if self.system is None else self.system
        if config == files.generation_config and system == files.system_prompt:
            return files
        return replace(files, system_prompt=system, generation_config=config)
