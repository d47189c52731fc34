"""`make bench ARGS=hits`: how much of a prompt each policy serves from cache, by architecture.

One conversation runs on each tiny architecture: further turns, a reworded question, another answer
to the same prompt, an old prompt again, a prompt that diverges within a turn. The cache knows the
turn ends. The result depends on the kinds of layers and on windows (here a few ids long), not on
tensors.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from app.engine.loop import Loop
from app.engine.memory_profile import profile_memory
from app.engine.policy import SchedulerLimits
from app.engine.prefix.cache import PrefixCache
from app.engine.prefix.radix import RadixPrefixCache
from app.engine.prefix.single import SinglePrefixCache
from app.engine.prefix.slots import SlotPrefixCache
from benchmarks.replay import UnboundedCache
from models.base import Model
from models.kv import LayerCache, evaluate_caches
from tests.engine.harness import job, run_one
from tests.models import parity
from tests.models.architectures import Case, cases

# numbers of ids: system prompt, start of a turn, question, answer, text without turns
SYSTEM, ROLE, QUESTION, ANSWER, RAW = 96, 3, 40, 24, 150
POLICIES = ("single", "slots", "radix")
PARALLEL, CHUNK, CONTEXT = 4, 64, 1024

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PrefixHit:
    """title: the event in the conversation. prompt: number of ids. cached: number of cached ids.
    max_cached: number of ids that an unbounded cache could serve."""

    title: str
    prompt: int
    cached: int
    max_cached: int


def run_conversation(model: Model, vocab: int, policy: str) -> list[PrefixHit]:
    """The highest id ends a turn. All answers have ANSWER ids."""
    loop, oracle = _make_loop(model, vocab, policy), UnboundedCache()
    rng, end = random.Random(0), vocab - 1
    hits: list[PrefixHit] = []

    def text(length: int) -> Ids:
        return tuple(rng.randrange(end) for _ in range(length))

    system, user, assistant = (*text(SYSTEM), end), text(ROLE), text(ROLE)

    def question() -> Ids:
        """A question as a template renders it: role, text, turn end, role of the next turn."""
        return (*user, *text(QUESTION), end, *assistant)

    def send(title: str, prompt: Ids) -> Ids:
        """Run a prompt; all ids with the answer and its turn end."""
        one = job(
            title,
            prompt,
            max_tokens=ANSWER,
            stop_token_ids=frozenset({end}),
            logit_bias=((end, -100.0),),
        )
        outcome = run_one(loop, one)
        assert len(outcome.ids) == ANSWER
        most = oracle.longest_prefix(prompt)
        hits.append(
            PrefixHit(title=title, prompt=len(prompt), cached=outcome.cached, max_cached=most)
        )
        evaluated = (*prompt, *outcome.ids)
        # the last sampled id is not evaluated
        oracle.add(evaluated[:-1])
        return (*evaluated, end)

    first = send("first turn", system + question())
    second = send("second turn", first + question())
    third = second + question()
    send("third turn", third)
    other = first + question()
    send("second turn, reworded", other)
    send("same prompt, new answer", other)
    send("third turn again", third)
    send("diverging within a turn", second[: len(first) + QUESTION // 2] + question())
    send("another chat, same system prompt", system + question())
    raw = text(RAW)
    send("a text without turns", raw)
    send("the same text", raw)
    send("once more", raw)
    return hits


def report() -> str:
    """Equal rows are merged; columns without cacheable ids are omitted."""
    rows: dict[tuple[str, tuple[int, ...]], list[Case]] = {}
    head: list[PrefixHit] = []
    for case in cases():
        with TemporaryDirectory() as place:
            parity.save_reference(case, Path(place))
            model = parity.load_model(Path(place))
        for policy in POLICIES:
            head = [one for one in run_conversation(model, case.vocab, policy) if one.max_cached]
            rows.setdefault((policy, tuple(one.cached for one in head)), []).append(case)
    lines = [
        _format_row("policy", [one.title for one in head], "models"),
        _format_row("---", ["---"] * len(head), "---"),
        _format_row("prompt ids", [one.prompt for one in head], ""),
        _format_row("most that could be cached", [one.max_cached for one in head], ""),
    ]
    # the policies in our order, and for each the highest numbers first
    for policy, served in sorted(rows, key=lambda row: (POLICIES.index(row[0]), -sum(row[1]))):
        lines.append(_format_row(policy, served, _architecture_names(rows[policy, served])))
    return "\n".join(lines)


def _format_row(first: str, cells: Sequence[object], last: str) -> str:
    return f"| {first} | {' | '.join(map(str, cells))} | {last} |"


def _architecture_names(found: Sequence[Case]) -> str:
    """Names of architectures, or of cases if those of an architecture differ."""
    kinds = Counter(case.config["model_type"] for case in cases())
    here = Counter(case.config["model_type"] for case in found)
    names = [
        kind if here[kind] == kinds[kind] else case.id
        for case in found
        for kind in [case.config["model_type"]]
    ]
    return ", ".join(dict.fromkeys(names))


def _make_loop(model: Model, vocab: int, policy: str) -> Loop:
    """An engine loop with the cache policy."""
    memory = profile_memory(
        model,
        budget=1 << 34,
        weights=0,
        chunk=CHUNK,
        max_batch_size=PARALLEL,
        heads=0,
        context=CONTEXT,
    )
    return Loop(
        model,
        _make_prefix_cache(model, policy),
        vocab=vocab,
        limits=SchedulerLimits(max_running=PARALLEL, max_prefill_tokens=CHUNK),
        memory=memory,
        context=CONTEXT,
    )


def _make_prefix_cache(model: Model, policy: str) -> PrefixCache[LayerCache]:
    match policy:
        case "single":
            return SinglePrefixCache(model.make_kv)
        case "radix":
            return RadixPrefixCache(model.make_kv, evaluate=evaluate_caches)
        case _:
            return SlotPrefixCache(
                model.make_kv,
                slots=PARALLEL,
                context=CONTEXT,
                multi_user=False,
                evaluate=evaluate_caches,
            )
