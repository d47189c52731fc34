"""Sampling parameters: one table of names, ranges and neutral values.

Knows: the parameters that clients and models may set. Must not know: how tokens are sampled, other
fields of the dialects.

The request readers, the runner's options, the reader of generation_config.json, the table in
docs/api.md and the schemas of openapi.yaml follow `SAMPLING_KNOBS` or are checked against it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

SamplingValue = float | int | tuple[tuple[int, float], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. All fields apply to one request only; `SAMPLING_KNOBS` describes
    them. logit_bias: pairs of a token id and the number added to its logit. seed: None draws a
    random one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    @staticmethod
    def merge(*layers: Mapping[str, SamplingValue]) -> "SamplingParams":
        """The server's defaults, overridden by each layer in turn: the model's, the request's."""
        merged: dict[str, SamplingValue] = {}
        for layer in layers:
            merged.update(layer)
        return replace(SamplingParams(), **merged)  # pyright: ignore[reportArgumentType]  # names are checked by replace, values by the edge that made the layer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingKnob:
    """A number that a request may set.

    name: name of the field in `SamplingParams`, in OpenAI's requests and in generation_config.json.
    low, high: inclusive range; with exclusive_low, low is excluded. doc: one sentence. model_high:
    upper limit for a model's files and the runner's client, if it differs from high. runner_name:
    option name of Ollama's runner, if it differs from name. runner_default: meaning of 0 from the
    runner's client, if it differs from the default of `SamplingParams`. off: a second value that
    disables the parameter, like the default."""

    name: str
    kind: type[float] | type[int]
    low: float
    high: float
    doc: str
    exclusive_low: bool = False
    model_high: float | None = None
    runner_name: str | None = None
    runner_default: float | None = None
    off: float | None = None

    @property
    def default(self) -> float | int | None:
        """The neutral value, which disables the parameter."""
        return getattr(SamplingParams(), self.name)

    @property
    def trusted_high(self) -> float:
        return self.high if self.model_high is None else self.model_high


SAMPLING_KNOBS: Sequence[SamplingKnob] = (
    SamplingKnob(
        name="temperature",
        kind=float,
        low=0,
        high=2,
        model_high=100,
        runner_default=0.0,
        doc="divides the logits; 0 takes the most likely token",
    ),
    SamplingKnob(
        name="top_p",
        kind=float,
        low=0,
        high=1,
        doc="keeps the most likely tokens up to this total probability",
    ),
    SamplingKnob(
        name="top_k",
        kind=int,
        low=-1,
        high=INT32_MAX,
        off=-1,
        doc="keeps this many of the most likely tokens",
    ),
    SamplingKnob(
        name="min_p",
        kind=float,
        low=0,
        high=1,
        doc="keeps tokens with at least this share of the highest probability",
    ),
    SamplingKnob(
        name="repetition_penalty",
        kind=float,
        low=0,
        high=10,
        exclusive_low=True,
        runner_name="repeat_penalty",
        doc="divides positive logits of tokens that occurred and multiplies negative ones",
    ),
    SamplingKnob(
        name="presence_penalty",
        kind=float,
        low=-2,
        high=2,
        doc="is subtracted from the logits of tokens that occurred",
    ),
    SamplingKnob(
        name="frequency_penalty",
        kind=float,
        low=-2,
        high=2,
        doc="is subtracted from the logit of a token for each time that it occurred",
    ),
    SamplingKnob(
        name="repeat_last_n",
        kind=int,
        low=-1,
        high=INT32_MAX,
        doc="how many tokens back the penalties look, prompt included; -1 is all, 0 is none",
    ),
    SamplingKnob(
        name="seed",
        kind=int,
        low=INT64_MIN,
        high=INT64_MAX,
        doc="makes the output repeatable; without it every request draws a new one",
    ),
)
