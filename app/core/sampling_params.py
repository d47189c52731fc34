"""Sampling parameters: a table of names, ranges and neutral values.

Knows: the parameters that clients and models may set. Must not know: the sampler, other request
fields.

`SAMPLING_KNOBS` defines the parameters for the request parsers, the runner's options, the parser of
generation_config.json and the schemas in openapi.yaml. All of these are
generated from the table or checked against it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

SamplingValue = float | int | tuple[tuple[int, float], ...] | tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request. `SAMPLING_KNOBS` describes the fields. logit_bias:
    pairs of a token ID and the value to add to its logit. allowed_token_ids: the only tokens that
    may be sampled; empty allows all tokens. bad_words: token sequences that the output must not
    contain. seed: the random seed; None generates a random one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None

    @staticmethod
    def merge(*layers: Mapping[str, SamplingValue]) -> "SamplingParams":
        """Returns the server's defaults, overridden first by the model's values and then by the
        request's."""
        merged: dict[str, SamplingValue] = {}
        for layer in layers:
            merged.update(layer)
        return replace(SamplingParams(), **merged)  # pyright: ignore[reportArgumentType]  # replace checks the names; the values were checked when the layer was built


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingKnob:
    """A numeric sampling parameter that a request may set.

    name: the name of the field in `SamplingParams`, in OpenAI's requests and in
    generation_config.json. low, high: the range, including both bounds. doc: one sentence.
    model_high: the upper bound for model files and the runner's client, if it differs from high.
    runner_name: the name in Ollama's options and in llama.cpp, if it differs from name; OpenAI's
    requests may use either name. runner_default: the value used when the runner's client sends 0,
    if it differs from the default of `SamplingParams`. off: a second value that disables the
    parameter, in addition to the default.
    """

    name: str
    kind: type[float] | type[int]
    low: float
    high: float
    doc: str
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
        doc="The divisor of the logits; 0 selects the most likely token.",
    ),
    SamplingKnob(
        name="top_p",
        kind=float,
        low=0,
        high=1,
        doc="The total probability up to which the most likely tokens are kept.",
    ),
    SamplingKnob(
        name="top_k",
        kind=int,
        low=-1,
        high=INT32_MAX,
        off=-1,
        doc="The number of most likely tokens to keep.",
    ),
    SamplingKnob(
        name="min_p",
        kind=float,
        low=0,
        high=1,
        doc="The minimum probability of a token, as a fraction of the maximum probability.",
    ),
    # a smaller penalty would take logits out of the range of float32
    SamplingKnob(
        name="repetition_penalty",
        kind=float,
        low=0.01,
        high=10,
        runner_name="repeat_penalty",
        doc="The divisor of positive logits, and factor of negative ones, of repeated tokens.",
    ),
    SamplingKnob(
        name="presence_penalty",
        kind=float,
        low=-2,
        high=2,
        doc="The number subtracted from the logits of tokens that have occurred.",
    ),
    SamplingKnob(
        name="frequency_penalty",
        kind=float,
        low=-2,
        high=2,
        doc="The number subtracted from the logit of a token for each of its occurrences.",
    ),
    SamplingKnob(
        name="repeat_last_n",
        kind=int,
        low=-1,
        high=INT32_MAX,
        doc="The number of last tokens to penalize, including the prompt; -1 is all, 0 is none.",
    ),
    SamplingKnob(
        name="seed",
        kind=int,
        low=INT64_MIN,
        high=INT64_MAX,
        doc="The random seed, which makes the output repeatable; the default is a new random seed.",
    ),
)
