"""Sampling parameters: a table of names, ranges and neutral values, and how many alternatives with
log probabilities a token may have.

Knows: the parameters that clients and models may set, the limit of log probabilities, the maximum
contents of an event and of a response. Must not know: the sampler, other request fields.

`SAMPLING_KNOBS` defines the parameters for the request parsers, the runner's options, the parser of
generation_config.json and the schemas in openapi.yaml. All of these are
generated from the table or checked against it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.core.errors import AppError, ErrorKind

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

SamplingValue = float | int | tuple[tuple[int, float], ...] | tuple[int, ...] | None

# the limit of OpenAI's API
DEFAULT_MAX_LOGPROBS = 20

# the value of the setting, and in requests, for all tokens of the vocabulary, as in vLLM
WHOLE_VOCABULARY = -1

# The maximum number of alternatives of all sequences in one step. The process of a model sends a
# step as one message of at most 256 MiB (app/runners/channel.py), and an alternative takes up to 15
# bytes. Messages are decoded on the event loop, so the maximum is a quarter of that.
MAX_STEP_ALTERNATIVES = 1 << 22

# The maximum number of alternatives of one request, if its tokens have more than usual. They take
# about 250 bytes each until the response is encoded.
MAX_REQUEST_ALTERNATIVES = 1 << 22


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
        doc="The number of last tokens to penalize, including the prompt; -1 means all, 0 none.",
    ),
    SamplingKnob(
        name="seed",
        kind=int,
        low=INT64_MIN,
        high=INT64_MAX,
        doc="The random seed, which makes the output repeatable; the default is a new random seed.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsLimit:
    """maximum: the number of alternatives that a token may have. is_vocabulary: whether these are
    all tokens of the vocabulary."""

    maximum: int = DEFAULT_MAX_LOGPROBS
    is_vocabulary: bool = False

    def resolve(self, name: str, count: int | None) -> int | None:
        """Returns the number of alternatives for a value of the field `name`. Raises
        AppError(INVALID) if it is not allowed."""
        if count is None or 0 <= count <= self.maximum:
            return count
        if count == WHOLE_VOCABULARY and self.is_vocabulary:
            return self.maximum
        raise AppError(
            ErrorKind.INVALID,
            f"{name} must be an integer from 0 to {self.maximum}, not {count}",
            param=name,
        )


USUAL_LOGPROBS_LIMIT = LogprobsLimit()


def limit_logprobs(setting: int, *, vocab_size: int, parallel: int) -> LogprobsLimit:
    """Returns the limit of one model. setting: `Settings.max_logprobs`. parallel: the maximum
    number of concurrent sequences."""
    wanted = vocab_size if setting == WHOLE_VOCABULARY else min(setting, vocab_size)
    per_sequence = max(DEFAULT_MAX_LOGPROBS, MAX_STEP_ALTERNATIVES // parallel)
    maximum = min(wanted, per_sequence)
    return LogprobsLimit(maximum=maximum, is_vocabulary=maximum == vocab_size)
