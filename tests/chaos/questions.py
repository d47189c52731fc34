"""Five models, the questions, and the correct answers.

The answers are computed in advance by an engine in this process, one at a time: not by the tested
engine, in another process, and without other requests in the batch.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app import store
from app.core.events import TextDelta
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.engine.model_info import complete_config
from app.runners.admission import Admission
from app.runners.thread_runner import ThreadRunner
from app.serving.generation import Generation
from tests import tiny
from tests.batches import flatten

# layers, width: models of different sizes and seeds, so with different answers
SHAPES = {"anna": (2, 16), "bert": (2, 32), "carl": (3, 32), "dora": (4, 48), "emil": (2, 64)}

CONTEXT = 512
TOKENS = 24


@dataclass(frozen=True)
class ChaosQuestion:
    """seed: None is greedy."""

    model: str
    prompt: str
    seed: int | None

    def body(self) -> dict[str, object]:
        """The body of POST /v1/completions."""
        sampling = (
            {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}
        )
        request = {"model": self.model, "prompt": self.prompt, "max_tokens": TOKENS}
        return {**request, **sampling}


Answers = Mapping[ChaosQuestion, str]


def write_models(root: Path) -> None:
    for seed, (name, (layers, width)) in enumerate(SHAPES.items()):
        tiny.write(
            root / name,
            seed=seed,
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=2 * width,
        )


def make_questions(count: int, seed: int) -> Sequence[ChaosQuestion]:
    """`count` prompts, the same for each model, each greedy and with a seed: so an answer of the
    wrong model can be recognized."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz      "
    prompts = ["".join(rng.choices(letters, k=rng.randint(4, 300))) for _ in range(count)]
    return [
        ChaosQuestion(model, prompt, seed_)
        for model in SHAPES
        for number, prompt in enumerate(prompts)
        for seed_ in (None, number)
    ]


def compute_answers(root: Path, questions: Sequence[ChaosQuestion]) -> Answers:
    return asyncio.run(_compute_answers(root, questions))


async def _compute_answers(root: Path, questions: Sequence[ChaosQuestion]) -> Answers:
    answers: dict[ChaosQuestion, str] = {}
    for name in SHAPES:
        files = replace(complete_config(store.resolve(str(root / name))), name=name)
        settings = Settings(parallel=1, context=CONTEXT)
        runner = ThreadRunner(settings)
        await runner.start(files)
        try:
            engine = Admission(runner, settings.max_queue)
            generation = Generation(files, engine, settings)
            for question in questions:
                if question.model == name:
                    answers[question] = await _compute_answer(generation, question)
        finally:
            await runner.stop()
    return answers


async def _compute_answer(generation: Generation, question: ChaosQuestion) -> str:
    sampling = (
        {"temperature": 0.0}
        if question.seed is None
        else {"temperature": 1.0, "seed": question.seed}
    )
    request = GenerateRequest(
        model=question.model, prompt=question.prompt, sampling=sampling, max_tokens=TOKENS
    )
    async with generation.open(request) as events:
        return "".join(
            [event.text async for event in flatten(events) if isinstance(event, TextDelta)]
        )
