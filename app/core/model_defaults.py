"""The defaults of a served model that an administrator may change while the server runs.

Knows: their effect on a model's files. Must not know: where they are stored, the state of the
model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from app.core.generation_config import RANDOM_SAMPLING_KEYS
from app.core.model_files import ModelFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults:
    """The defaults of one model. A value that is None is that of the settings or of the model
    itself.

    name: the name under which the model is served. aliases: further names for requests. system: the
    system prompt of conversations that have none. context: the context length in tokens.
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
