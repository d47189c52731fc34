"""The training corpus of the built-in model: an endless sequence of generated conversations,
reproducible from a seed.

Knows: the mixture of abilities, and how conversations are composed. Must not know: tokens, tensors,
the held-out questions. `python -m tools.builtin_model.corpus` prints a few conversations.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tools.builtin_model import (
    corpus_api,
    corpus_client,
    corpus_commands,
    corpus_refusals,
    corpus_server,
    corpus_small_talk,
)
from tools.builtin_model.augmentation import (
    add_noise,
    add_politeness,
    capitalize,
    expand,
    reword,
)
from tools.builtin_model.corpus_computed import (
    Turn,
    make_addition_turn,
    make_counting_turn,
    make_name_turns,
    make_repeat_turn,
)
from tools.builtin_model.corpus_facts import (
    ABOUT_FRAMES,
    HOW_FRAMES,
    PHRASES,
    ROUTE_FRAMES,
    FactTemplate,
)
from tools.builtin_model.corpus_paraphrases import PARAPHRASES
from tools.builtin_model.corpus_stories import make_story, make_story_turn

# each fact is asked for in the words of its own file and in paraphrases
FACTS = (
    corpus_server.FACTS
    + corpus_api.FACTS
    + corpus_client.FACTS
    + corpus_commands.FACTS
    + PARAPHRASES
)

# pairs of an ability and its percentage of turns
MIXTURE = (
    ("fact", 66),
    ("talk", 13),
    ("joke", 2),
    ("decline", 9),
    ("count", 13),
    ("add", 11),
    ("story", 6),
    ("repeat", 2),
    ("meet", 2),
)
# abilities whose questions are recognised by a few of their words
_NOISY_ABILITIES = frozenset({"fact", "talk", "joke", "decline"})
_FRAME_WEIGHTS = {"asks": 5, "to": 4, "route_to": 5, "about": 1.5}
_LENGTHS = (1, 2, 3, 4)
_LENGTH_WEIGHTS = (55, 25, 12, 8)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant{ who answers briefly| named Max| of a school|}.",
    "{Answer|Reply} {in one sentence|briefly|politely|in plain English|as well as you can}.",
    "You are {a friendly|a careful|an expert|a concise|a cheerful} {teacher|guide|engineer|chatbot}.",
    "{Be|Please be} {short|kind|precise|helpful|honest}{ and friendly|}.",
    "{The user is|You talk to} {a child|a developer|a customer|a student} {who likes|from|who asks about} "
    "{TOPIC|PLACE}.",
    "You are {a pirate|a poet|a cat|a tour guide in PLACE|an expert on TOPIC}. Stay in character.",
    "{Today is|The date is} {Monday|Friday|a holiday}. {Never|Always} {talk about|mention} TOPIC.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A training conversation. turns: (question, answer) pairs; empty for plain text without a
    chat."""

    turns: tuple[Turn, ...] = ()
    system: str | None = None
    text: str = ""


def generate_corpus(seed: int, count: int, noise_share: float = 0.0) -> Iterator[Conversation]:
    """`count` conversations, reproducible from the seed. noise_share: share of the questions to
    which noise is added, among those that need not be taken literally."""
    rng = random.Random(seed)
    return islice(iter(lambda: make_conversation(rng, noise_share), None), count)


def make_conversation(rng: random.Random, noise_share: float = 0.0) -> Conversation:
    """One conversation of one to four turns, a fifth of them with a system prompt; two in a hundred
    are plain texts, for the endpoints without chat."""
    if rng.random() < 0.02:
        return Conversation(
            text=make_story(rng) if rng.random() < 0.7 else _make_fact_turn(rng, FACTS)[1]
        )
    wanted = rng.choices(_LENGTHS, _LENGTH_WEIGHTS)[0]
    turns: list[Turn] = []
    while len(turns) < wanted:
        turns += make_turns(rng, noise_share)
    system = _make_system_prompt(rng) if rng.random() < 0.2 else None
    return Conversation(
        turns=tuple((add_politeness(ask, rng), answer) for ask, answer in turns), system=system
    )


def make_turns(rng: random.Random, noise_share: float = 0.0) -> list[Turn]:
    """Returns the next turn, or the next two turns if they belong together."""
    abilities, shares = zip(*MIXTURE, strict=True)
    ability = rng.choices(abilities, shares)[0]
    # text that the answer must repeat must not be reworded
    if ability == "repeat":
        return [make_repeat_turn(rng)]
    if ability == "meet":
        return make_name_turns(rng)
    ask, answer = _make_turn(ability, rng)
    ask = reword(ask, rng)
    return [(add_noise(ask, rng, noise_share) if ability in _NOISY_ABILITIES else ask, answer)]


def _make_turn(ability: str, rng: random.Random) -> Turn:
    match ability:
        case "fact":
            return _make_fact_turn(rng, FACTS)
        case "talk":
            return _make_fact_turn(rng, corpus_small_talk.SMALL_TALK)
        case "joke":
            asked = expand(rng.choice(corpus_small_talk.JOKE_ASKS), rng, {})
            return asked, rng.choice(corpus_small_talk.JOKES)
        case "decline":
            return _make_refusal_turn(rng)
        case "count":
            return make_counting_turn(rng)
        case "add":
            return make_addition_turn(rng)
        case "story":
            return make_story_turn(rng)
        case _:
            raise AssertionError(f"no such ability: {ability}")


def _make_fact_turn(rng: random.Random, facts: tuple[FactTemplate, ...]) -> Turn:
    fact = rng.choices(facts, [fact.weight for fact in facts])[0]
    kinds = {kind: share for kind, share in _FRAME_WEIGHTS.items() if getattr(fact, kind)}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    wish = expand(rng.choice(getattr(fact, kind)), rng, PHRASES)
    match kind:
        case "to":
            frame = expand(rng.choice(HOW_FRAMES), rng, PHRASES)
        case "route_to":
            frame = expand(rng.choice(ROUTE_FRAMES), rng, PHRASES)
        case "about":
            frame = expand(rng.choice(ABOUT_FRAMES), rng, PHRASES)
        case _:
            frame = "WHOLE"
    for slot in ("VERB", "TOPIC", "WHOLE"):
        frame = frame.replace(slot, wish)
    return frame, rng.choice(fact.answers)


def _make_refusal_turn(rng: random.Random) -> Turn:
    answer, asks = rng.choice(corpus_refusals.REFUSALS)
    return _fill_topics(expand(rng.choice(asks), rng, {}), rng), answer


def _fill_topics(text: str, rng: random.Random) -> str:
    """Replaces each capitalized slot with a random topic."""
    slots = {
        "TOPIC": corpus_refusals.TOPICS,
        "PLACE": tuple(capitalize(place) for place in corpus_refusals.PLACES),
        "LANGUAGE": tuple(capitalize(language) for language in corpus_refusals.LANGUAGES),
        "NAMED": corpus_refusals.NAMED_THINGS,
        "NUMBER": tuple(str(number) for number in range(21, 100)),
        "SMALL": tuple(str(number) for number in range(2, 21)),
        "BIG": tuple(str(number) for number in range(100, 10000, 7)),
    }
    for slot, words in slots.items():
        while slot in text:
            text = text.replace(slot, rng.choice(words), 1)
    return text


def _make_system_prompt(rng: random.Random) -> str:
    sentences = rng.choices((1, 2, 4), (70, 22, 8))[0]
    return " ".join(
        _fill_topics(expand(rng.choice(SYSTEMS), rng, {}), rng) for _ in range(sentences)
    )


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    for made in generate_corpus(seed, 12):
        for line in (made.system and f"system: {made.system}", made.text):
            if line:
                print(line)
        for ask, answer in made.turns:
            print(f"  > {ask}\n    {answer}")


if __name__ == "__main__":
    main()
