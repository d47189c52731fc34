"""A proof: the same requests under each condition, compared with a reference.

Knows: conversations that exercise each part of the sampler, conditions, which conditions must give
equal bits. Must not know: HTTP, the layout of the report.

The same seed gives the same conversations.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.core.errors import AppError
from app.core.jobs import Capacity, ContextLimit
from app.core.model_files import ModelFiles
from app.core.requests import Conversation, GenerateRequest, Grammar, JsonSchema, Message
from app.core.sampling_params import SamplingValue
from app.core.settings import Settings
from app.grammar.compiler import GrammarCompiler
from app.prove.comparison import Answer, Comparison, compare
from app.prove.conditions import (
    CONDITIONS,
    Chains,
    Condition,
    ConditionResult,
    ProofModel,
    run_alone,
)
from app.prove.engine import ProofEngine, ProofJob
from app.prove.without_kernels import run_without_kernels
from app.serving.prompt_jobs import JobBuilder

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

MAX_TOKENS, TOP_LOGPROBS = 32, 5

DEFAULT_CONVERSATIONS, MIN_CONVERSATIONS = 12, 2

# The number of times that the conversations are computed, for the estimate of the time.
_PASSES = 9

# The share of the time that MLX's own operations may take is 1 / this.
_WITHOUT_KERNELS_SHARE = 3

# Long answers, which outgrow the memory that a sequence reserves at its start. The first number is
# the length of the prompt.
_LONG_PROMPT, _LONG_OUTPUT, _LONG_ANSWERS = 250, 300, 2

# the share of the context that a long question may have is 1 / this
_LONG_TEXT_SHARE = 3

# The largest difference of two log probabilities where equal bits are not promised. Without our
# kernels, MLX's float32 operations differ by up to 1e-3; a GPU computes in 16 bits.
_TOLERANCES = {"cpu": 0.01, "gpu": 0.25}

# The same on a CPU, if keys and values have 16 bits: two numbers that differ in the last bits of
# float32 may be stored as neighbours. Measured: up to 2e-2 and 4e-3.
_KV_TOLERANCES = {"bfloat16": 0.25, "float16": 0.03}

# The same, by the bits of activations: the kernels round the inputs of quantized layers, MLX does
# not. Measured with 16 bits: up to 1e-2. With 8 bits, there is no useful tolerance.
_ACTIVATION_TOLERANCES = {16: 0.05}
_FEWEST_COMPARED_BITS = 16


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofOptions:
    """seed: the seed of the conversations. conversations: the number of conversations; None for as
    many as fit in `seconds`."""

    seed: int = 0
    conversations: int | None = None
    seconds: float = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionReport:
    """The comparison of one condition. answers: the number of compared answers; 0 if the condition
    was not run, and detail then says why. tolerance: None if equal bits are required. largest: the
    largest difference of two log probabilities. first_difference: where the first answer differs
    that is not equal."""

    name: str
    cause: str
    detail: str
    answers: int = 0
    equal: int = 0
    near_ties: int = 0
    different: int = 0
    tolerance: float | None = None
    largest: float = 0.0
    first_difference: str | None = None

    @property
    def passed(self) -> bool:
        """Near-ties are rare. If most answers diverge, something is wrong."""
        return not self.different and self.near_ties * 2 <= self.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRequest:
    """One request of a conversation, with its reference answer. request: as the server gets it."""

    label: str
    request: GenerateRequest
    job: ProofJob
    expected: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The reference of a proof. chains: the requests of each conversation. long: requests with long
    answers; empty if they do not fit, and `long_skipped` then says why."""

    chains: tuple[tuple[ProofRequest, ...], ...]
    long: tuple[ProofRequest, ...]
    long_skipped: str
    capacity: Capacity
    batch_invariant: bool

    @property
    def requests(self) -> Sequence[ProofRequest]:
        return [request for chain in self.chains for request in chain]


class Proof:
    """Runs a proof. Raises AppError if the model cannot be loaded or an engine fails."""

    def __init__(self, files: ModelFiles, settings: Settings, options: ProofOptions) -> None:
        self._files, self._settings, self._options = files, settings, options
        self._model = ProofModel(
            files=files, settings=settings, grammars=GrammarCompiler.for_model(files)
        )
        self._builder = JobBuilder(files, settings)

    def open_engine(self) -> ProofEngine:
        """Loads the engine of the reference."""
        return self._model.engine(parallel=1, cache="single")

    def compute_reference(self) -> Reference:
        """Generates the conversations: the prompt of each turn contains the answer of the turn
        before it."""
        with self.open_engine() as engine:
            options = self._options
            count = options.conversations or DEFAULT_CONVERSATIONS
            chains: list[tuple[ProofRequest, ...]] = []
            started = time.monotonic()
            for number, spec in enumerate(generate_conversations(options.seed, count)):
                if len(chains) >= MIN_CONVERSATIONS and options.conversations is None:
                    mean = (time.monotonic() - started) / len(chains)
                    if mean * (len(chains) + 1) * _PASSES > options.seconds:
                        break
                chains.append(tuple(self._hold(engine, number, spec)))
            tokens = sum(len(request.expected.tokens) for chain in chains for request in chain)
            per_token = (time.monotonic() - started) / max(tokens, 1)
            long, skipped = self._compute_long(engine, chains[0][0].job, per_token)
            return Reference(
                chains=tuple(chains),
                long=long,
                long_skipped=skipped,
                capacity=engine.capacity,
                batch_invariant=engine.batch_invariant,
            )

    def cut_at_stop_string(self, answer: Answer) -> Answer:
        """Returns the part of an answer of the engine that a server sends, if the model has stop
        strings: the tokens with text before the first of them."""
        decode = self._builder.tokenizer.decode
        text = decode(answer.ids)
        found = [text.index(stop) for stop in self._builder.stop_strings if stop in text]
        if not found:
            return answer
        lengths = range(len(answer.ids) + 1)
        length = next(n for n in lengths if len(decode(answer.ids[:n])) >= min(found))
        return replace(answer, tokens=answer.tokens[:length], reason="stop")

    def run(self, reference: Reference, report: Callable[[str], None]) -> Iterator[ConditionReport]:
        """Yields the result of each condition. report: is called with the name of a condition
        before it is run."""
        chains = [[request.job for request in chain] for chain in reference.chains]
        for condition in CONDITIONS:
            report(condition.name)
            yield self._run_condition(condition, reference, chains)
        report("without kernels")
        yield self._compare_without_kernels(reference, chains)

    def tolerance(self, reference: Reference, condition: Condition | None = None) -> float | None:
        """Returns None if the condition must not change any bit."""
        changes_chunks = condition is not None and condition.changes_chunks
        if reference.batch_invariant or (self._settings.exact and not changes_chunks):
            return None
        return _find_tolerance(reference.capacity)

    @staticmethod
    def make_failure(message: str) -> tuple[str, Comparison]:
        """Returns the comparison of answers that do not exist."""
        return "all answers", Comparison(verdict="different", difference=message)

    @staticmethod
    def make_report(
        name: str,
        cause: str,
        pairs: Sequence[tuple[str, Comparison]],
        detail: str,
        tolerance: float | None = None,
    ) -> ConditionReport:
        """pairs: the place and the comparison of each answer."""
        verdicts = [comparison.verdict for _, comparison in pairs]
        # a difference that fails the proof is more interesting than a near-tie
        ordered = sorted(pairs, key=lambda pair: pair[1].verdict != "different")
        differences = [f"{label}, {c.difference}" for label, c in ordered if c.difference]
        return ConditionReport(
            name=name,
            cause=cause,
            detail=detail,
            answers=len(pairs),
            equal=verdicts.count("equal"),
            near_ties=verdicts.count("near-tie"),
            different=verdicts.count("different"),
            tolerance=tolerance,
            largest=max((comparison.largest for _, comparison in pairs), default=0.0),
            first_difference=differences[0] if differences else None,
        )

    # the reference

    def _hold(
        self, engine: ProofEngine, number: int, spec: ConversationSpec
    ) -> Iterator[ProofRequest]:
        """Holds a conversation. Ends early if the context is full."""
        # Conversations alternate between the adapters and the model without one.
        adapters = [*(adapter.name for adapter in self._settings.adapters), ""]
        adapter = adapters[number % len(adapters)]
        kind = f"{spec.label}, adapter {adapter}" if adapter else spec.label
        messages: list[Message] = []
        for turn, question in enumerate(spec.questions):
            if turn == 0 and spec.long_text:
                question = f"{question} {self._clip(spec.long_text, engine.capacity)}"
            messages.append(Message(role="user", content=question))
            label = f"conversation {number + 1} ({kind}), turn {turn + 1}"
            request = GenerateRequest(
                model=self._files.name,
                adapter=adapter,
                prompt=Conversation(messages=tuple(messages)),
                sampling=spec.sampling,
                grammar=spec.grammar,
                max_tokens=MAX_TOKENS,
                top_logprobs=TOP_LOGPROBS,
                return_token_ids=True,
            )
            try:
                job = self._build_job(engine, request, f"{number}.{turn}")
            except AppError:
                if turn:
                    return  # the answer filled the context
                raise
            expected = self._answer(engine, job)
            is_last = turn == len(spec.questions) - 1
            yield ProofRequest(
                label=label,
                request=request,
                job=replace(job, cancel_after=spec.cancel_after if is_last else None),
                expected=expected,
            )
            text = self._builder.tokenizer.decode(expected.ids)
            messages.append(Message(role="assistant", content=text))

    def _clip(self, text: str, capacity: Capacity) -> str:
        """Returns the start of a text, so that a conversation fits in the context."""
        ids = self._builder.tokenizer.encode(text, add_special_tokens=False)
        return self._builder.tokenizer.decode(ids[: capacity.context_length // _LONG_TEXT_SHARE])

    def _build_job(self, engine: ProofEngine, request: GenerateRequest, name: str) -> ProofJob:
        limit = ContextLimit(
            model_context=self._files.context_length,
            configured_context=self._settings.context,
            capacity=engine.capacity,
        )
        [choice] = self._builder.prepare(request, limit)
        return ProofJob(job=replace(choice.job, id=name))

    def _answer(self, engine: ProofEngine, job: ProofJob) -> Answer:
        [answer] = run_alone(engine, [[job]]).values()
        return answer

    def _compute_long(
        self, engine: ProofEngine, first: ProofJob, per_token: float
    ) -> tuple[tuple[ProofRequest, ...], str]:
        """Repeats the first prompt to the length of the long prompts."""
        needed = _LONG_PROMPT + _LONG_OUTPUT
        if engine.capacity.context_length < needed:
            return (), f"needs a context of {needed} tokens"
        seconds = 4 * _LONG_ANSWERS * _LONG_OUTPUT * per_token
        if seconds > self._options.seconds:
            return (), f"would take about {seconds:.0f} s: raise --seconds"
        ids = first.job.prompt_token_ids
        ids = (ids * (1 + _LONG_PROMPT // len(ids)))[:_LONG_PROMPT]
        requests: list[ProofRequest] = []
        for number in range(_LONG_ANSWERS):
            sampling = replace(first.job.sampling, temperature=1.0, seed=number)
            job = replace(
                first.job,
                id=f"long.{number}",
                prompt_token_ids=ids,
                sampling=sampling,
                max_tokens=_LONG_OUTPUT,
                stop_token_ids=frozenset(),
                message_ends=None,
            )
            proof_job = ProofJob(job=job)
            requests.append(
                ProofRequest(
                    label=f"long answer {number + 1}",
                    request=GenerateRequest(model=self._files.name, prompt=ids),
                    job=proof_job,
                    expected=self._answer(engine, proof_job),
                )
            )
        return tuple(requests), ""

    # the conditions

    def _run_condition(
        self, condition: Condition, reference: Reference, chains: Chains
    ) -> ConditionReport:
        requests = reference.long if condition.uses_long else reference.requests
        if not requests:
            return self.make_report(condition.name, condition.cause, [], reference.long_skipped)
        jobs = [[request.job] for request in reference.long] if condition.uses_long else chains
        try:
            result = condition.run(self._model, jobs)
        except AppError as error:
            result = ConditionResult(answers={}, detail=error.message)
        if result.answers is None:
            return self.make_report(condition.name, condition.cause, [], result.detail)
        tolerance = self.tolerance(reference, condition)
        return self.make_report(
            condition.name,
            condition.cause,
            _compare_all(requests, result.answers, tolerance),
            result.detail,
            tolerance,
        )

    def _compare_without_kernels(self, reference: Reference, chains: Chains) -> ConditionReport:
        name, cause = "without kernels", "mlxrunner's CPU kernels"
        backend = reference.capacity.backend
        if backend is None or backend.kernels is None:
            return self.make_report(name, cause, [], "this device does not use them")
        if backend.activations is not None and backend.activations < _FEWEST_COMPARED_BITS:
            why = f"with --activations {backend.activations}, the kernels round more than MLX"
            return self.make_report(name, cause, [], why)
        settings = replace(self._settings, parallel=1, cache="single", activations="auto")
        seconds = self._options.seconds / _WITHOUT_KERNELS_SHARE
        try:
            answers = run_without_kernels(self._files, settings, chains, seconds)
        except AppError as error:
            return self.make_report(name, cause, [], error.message)
        requests = [request for request in reference.requests if request.job.job.id in answers]
        if not requests:
            why = f"MLX's operations gave no answer in {seconds:.0f} s: raise --seconds"
            return self.make_report(name, cause, [], why)
        tolerance = _find_tolerance(reference.capacity)
        pairs = _compare_all(requests, answers, tolerance)
        detail = f"rounds differently: up to {tolerance:g}"
        if len(requests) < len(reference.requests):
            detail += f"; as many as finished in {seconds:.0f} s"
        return self.make_report(name, cause, pairs, detail, tolerance)


def _find_tolerance(capacity: Capacity) -> float:
    backend = capacity.backend
    device = "cpu" if backend is None else backend.device
    bits = None if backend is None else backend.activations
    return max(
        _TOLERANCES[device],
        _KV_TOLERANCES.get(capacity.kv_dtype or "", 0.0),
        _ACTIVATION_TOLERANCES.get(bits or 0, 0.0),
    )


def _compare_all(
    requests: Sequence[ProofRequest], answers: Mapping[str, Answer], tolerance: float | None
) -> Sequence[tuple[str, Comparison]]:
    """Compares every answer with its reference. A job may have been answered again, under its own
    ID and a suffix."""
    compared: list[tuple[str, Comparison]] = []
    for request in requests:
        name = request.job.job.id
        comparisons = [
            answer for id_, answer in answers.items() if id_ == name or id_.startswith(f"{name} ")
        ]
        if not comparisons:
            missing = Comparison(verdict="different", difference="there is no answer")
            compared.append((request.label, missing))
        compared += [
            (request.label, compare(request.expected, answer, tolerance)) for answer in comparisons
        ]
    return compared
