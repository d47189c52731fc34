"""The conversations of a proof: requests that exercise each part of the sampler.

Knows: sampling parameters, schemas, texts. Must not know: engines, tokens.

The same seed gives the same conversations.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.core.requests import Grammar, JsonSchema
from app.core.sampling_params import SamplingValue

TURNS = 2

# An answer is cancelled after this many tokens.
_CANCEL_RANGE = (3, 12)

_QUESTIONS: Sequence[str] = (
    "Hello! Who are you?",
    "Tell me a short story about a fox.",
    "What can I do with this server?",
    "Count from 3 to 12.",
    "How do I send a request from Python?",
    "Explain what a prefix cache is.",
    "Write a list of three colors.",
    "What is the sum of 7 and 8?",
    "Describe a quiet morning by the sea.",
    "Which port does the server use?",
)

# of the longest prompt, so that its prefill takes several chunks
_LONG_TEXT_WORDS = 400
_WORDS: Sequence[str] = (
    *("river", "stone", "green", "window", "seven", "paper", "light", "song", "table", "open"),
    *("water", "garden", "small", "engine", "north", "letter", "bread", "simple", "cloud"),
    *("road", "memory", "silver", "morning", "number", "wheel", "quiet", "forest", "market"),
)

_SCHEMA = JsonSchema(
    text='{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, '
    '"count": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}}, '
    '"required": ["name", "count", "ok"], "additionalProperties": false}'
)

_GREEDY: Mapping[str, SamplingValue] = {"temperature": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSpec:
    """A conversation. label: describes its requests. questions: one per turn. long_text: is added
    to the first question, as far as the context allows. sampling: the sampling parameters of all
    turns. cancel_after: the number of tokens after which the last answer is cancelled; None for
    never."""

    label: str
    questions: tuple[str, ...]
    long_text: str = ""
    sampling: Mapping[str, SamplingValue] = field(default_factory=lambda: _GREEDY)
    grammar: Grammar | None = None
    cancel_after: int | None = None


# Each row differs in the stages of the sampler that it uses. The first ones are the most general,
# because a slow model runs only these.
_KINDS: Sequence[tuple[str, Mapping[str, SamplingValue], Grammar | None]] = (
    ("greedy", _GREEDY, None),
    ("seeded, top_p", {"temperature": 1.0, "top_p": 0.9}, None),
    ("penalties", {**_GREEDY, "repetition_penalty": 1.3, "frequency_penalty": 0.5}, None),
    ("JSON schema", _GREEDY, _SCHEMA),
    ("seeded, top_k, min_p", {"temperature": 0.7, "top_k": 40, "min_p": 0.02}, None),
    ("seeded, JSON schema", {"temperature": 1.2}, _SCHEMA),
    (
        "seeded, penalties",
        {"temperature": 0.9, "presence_penalty": 1.0, "repeat_last_n": 32},
        None,
    ),
    ("greedy, logit_bias", {**_GREEDY, "logit_bias": ((5, -3.0), (9, 2.0))}, None),
)


def generate_conversations(seed: int, count: int) -> Sequence[ConversationSpec]:
    """Returns `count` conversations, at least 2. The first one has a long prompt, and the last
    answer of every third one is cancelled."""
    rng = random.Random(seed)
    return [_generate(rng, number) for number in range(count)]


def _generate(rng: random.Random, number: int) -> ConversationSpec:
    label, sampling, grammar = _KINDS[number % len(_KINDS)]
    questions = rng.sample(_QUESTIONS, TURNS)
    long_text = ""
    if number == 0:
        questions[0] = "Repeat the first five words of this text:"
        long_text = " ".join(rng.choices(_WORDS, k=_LONG_TEXT_WORDS))
    if sampling != _GREEDY and sampling.get("temperature"):
        sampling = {**sampling, "seed": rng.randrange(1 << 31)}
    return ConversationSpec(
        label=label,
        questions=tuple(questions),
        long_text=long_text,
        sampling=sampling,
        grammar=grammar,
        cancel_after=rng.randint(*_CANCEL_RANGE) if number % 3 == 2 else None,
    )
