"""The request bodies for model management.

Knows: their fields. Must not know: how models are loaded, where defaults are stored.
"""

from typing import Annotated

from msgspec import Meta

from app.api.schema.base import Options, Text, describe
from app.api.schema.decode import BodyDecoder
from app.api.schema.generation import (
    KeepAlive,
    MinP,
    Penalty,
    RepeatLastN,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from app.core.sampling_params import INT32_MAX

MAX_ALIASES = 16


class ModelBody(Options, kw_only=True, frozen=True):
    """The body of POST /v1/models/unload and /v1/models/preview."""

    model: str


class LoadBody(ModelBody, kw_only=True, frozen=True):
    """The body of POST /v1/models/load."""

    keep_alive: KeepAlive = None
    ttl: KeepAlive = None


class DefaultValues(Options, kw_only=True, frozen=True):
    """The defaults of a model. A field that is absent resets its value."""

    aliases: Annotated[
        Text | Annotated[list[Text], Meta(max_length=MAX_ALIASES)] | None,
        describe(
            "Additional names of the model for requests.",
            expected="a string or an array of strings, none of them empty",
        ),
    ] = None
    system: str | None = None
    context: Annotated[int, Meta(ge=2, le=INT32_MAX)] | None = None
    keep_alive: KeepAlive = None
    ttl: KeepAlive = None
    max_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repeat_last_n: RepeatLastN = None
    seed: Seed = None


class DefaultsBody(ModelBody, kw_only=True, frozen=True):
    """The body of POST /v1/models/defaults."""

    defaults: DefaultValues | None = None


class LoadAdapterBody(Options, kw_only=True, frozen=True):
    """The body of POST /v1/load_lora_adapter, with vLLM's fields and the name of a model."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str | None = None


class UnloadAdapterBody(Options, kw_only=True, frozen=True):
    """The body of POST /v1/unload_lora_adapter, with vLLM's fields and the name of a model.
    lora_int_id: has no effect, as in vLLM."""

    lora_name: str
    lora_int_id: int | None = None
    model: str | None = None


MODEL = BodyDecoder(ModelBody)
LOAD_ADAPTER = BodyDecoder(LoadAdapterBody)
UNLOAD_ADAPTER = BodyDecoder(UnloadAdapterBody)
LOAD = BodyDecoder(LoadBody)
DEFAULTS = BodyDecoder(DefaultsBody)
