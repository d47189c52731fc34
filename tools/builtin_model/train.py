"""Trains the built-in model from scratch: corpus, tokenizer, weights, and the files of the model
folder.

Knows: the recipe: sizes, rates and lengths. Must not know: the held-out questions, except to reject
a corpus that contains one. Run `python -m tools.builtin_model.train` (`make builtin`); needs
the packages of requirements.txt. The same seed gives the same files on the same kind of machine.
"""

import argparse
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save
from tokenizers import Tokenizer

from tools.builtin_model.augmentation import normalize
from tools.builtin_model.corpus import Conversation, generate_corpus
from tools.builtin_model.evaluate import HELD_OUT, load_questions
from tools.builtin_model.jax_llama import NetworkShape, Weights, initial_weights, loss
from tools.builtin_model.optimizer import Moments, Optimizer
from tools.builtin_model.tokenization import (
    TURN_END,
    EncodedConversation,
    encode,
    make_tokenizer_config,
    train_tokenizer,
)

FOLDER = Path(__file__).resolve().parents[2] / "models/builtin"
CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRound:
    """One training round. conversations: the number of generated conversations. noise_share: the
    fraction of questions to which noise is added. steps: the number of optimizer steps. rate: the
    peak learning rate, reached after the warmup; it then decays to 0."""

    conversations: int
    noise_share: float
    steps: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """The training recipe. for_tokenizer: the number of conversations for training the tokenizer.
    batch: the number of tokens per step. short, long: the two row lengths into which conversations
    are packed, in tokens. rounds: the first round trains the answers, and the following rounds
    train the recognition of incomplete questions. further_rounds: the rounds of a training that
    starts from a trained model, whose corpora differ from those of `rounds`."""

    seed: int = 0
    for_tokenizer: int = 20_000
    vocabulary: int = 1024
    batch: int = 2048
    short: int = 128
    long: int = 256
    warmup: int = 50
    rounds: tuple[TrainingRound, ...] = (
        TrainingRound(conversations=160_000, noise_share=0.15, steps=5000, rate=4e-3),
        TrainingRound(conversations=60_000, noise_share=0.4, steps=800, rate=2e-3),
        TrainingRound(conversations=40_000, noise_share=0.5, steps=420, rate=1.5e-3),
    )
    further_rounds: tuple[TrainingRound, ...] = (
        TrainingRound(conversations=50_000, noise_share=0.15, steps=1000, rate=3e-3),
        TrainingRound(conversations=20_000, noise_share=0.3, steps=300, rate=1.5e-3),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Packed rows, each (rows, length + 1); see jax_llama.logits and jax_llama.loss."""

    ids: np.ndarray[Any, Any]
    segments: np.ndarray[Any, Any]
    loss_weights: np.ndarray[Any, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=TrainingRecipe().seed)
    parser.add_argument(
        "--part",
        type=float,
        default=1.0,
        help="share of the conversations and steps, for a trial run",
    )
    parser.add_argument(
        "--start",
        type=Path,
        help="the folder of a trained model to start from; its tokenizer is kept",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder to write the model to")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        help="a folder; the model is also written to a folder round-N in it after round N",
    )
    options = parser.parse_args()
    out: Path = options.out
    checkpoints: Path | None = options.checkpoints
    recipe = TrainingRecipe(seed=options.seed)
    start: Path | None = options.start
    if start:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
        loaded = load_file(start / "model.safetensors")
        weights = {name: jnp.asarray(array) for name, array in loaded.items()}
        # rounds with different numbers have different corpora
        rounds = tuple(enumerate(recipe.further_rounds, start=len(recipe.rounds)))
    else:
        tokenizer = train_tokenizer(
            generate_corpus(recipe.seed, recipe.for_tokenizer), recipe.vocabulary
        )
        weights = {}
        rounds = tuple(enumerate(recipe.rounds))
    shape = NetworkShape(vocab_size=tokenizer.get_vocab_size())
    weights = weights or initial_weights(shape, jax.random.key(recipe.seed))
    print(f"{sum(weight.size for weight in weights.values())} parameters")
    for number, whole in rounds:
        weights = train_round(
            recipe, number, scale_round(whole, options.part), shape, weights, tokenizer
        )
        if checkpoints:
            write(checkpoints / f"round-{number}", shape, weights, tokenizer)
    write(out, shape, weights, tokenizer)
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    print(f"wrote {out}, model.safetensors sha256 {digest}")


def check_held_out(conversations: Iterable[Conversation]) -> None:
    """Asserts that no held-out question is in the corpus."""
    held_back = {normalize(question.question) for question in load_questions(HELD_OUT)}
    for conversation in conversations:
        for ask, _ in conversation.turns:
            assert normalize(ask) not in held_back, f"a held-out question is in the corpus: {ask}"


def scale_round(training_round: TrainingRound, share: float) -> TrainingRound:
    return replace(
        training_round,
        conversations=max(500, round(training_round.conversations * share)),
        steps=max(1, round(training_round.steps * share)),
    )


def train_round(
    recipe: TrainingRecipe,
    number: int,
    training_round: TrainingRound,
    shape: NetworkShape,
    weights: Weights,
    tokenizer: Tokenizer,
) -> Weights:
    """Trains `weights` for one round with a separate corpus, and prints the progress."""
    made = list(
        generate_corpus(
            recipe.seed + number, training_round.conversations, training_round.noise_share
        )
    )
    check_held_out(made)
    optimizer = Optimizer()
    moments = optimizer.init(weights)
    batches = _iter_batches(recipe, encode(tokenizer, made), random.Random(recipe.seed + number))

    @partial(jax.jit, donate_argnums=(0, 1))
    def improve(
        weights: Weights,
        moments: Moments,
        rows: tuple[jax.Array, ...],
        rate: jax.Array,
        step: jax.Array,
    ) -> tuple[Weights, Moments, jax.Array]:
        value, gradient = jax.value_and_grad(lambda now: loss(shape, now, *rows))(weights)
        weights, moments = optimizer.update(weights, gradient, moments, rate, step)
        return weights, moments, value

    began, recent = time.monotonic(), []
    for step in range(training_round.steps):
        batch = next(batches)
        rows = (
            jnp.asarray(batch.ids),
            jnp.asarray(batch.segments),
            jnp.asarray(batch.loss_weights),
        )
        rate = jnp.float32(_learning_rate(recipe, training_round, step))
        weights, moments, value = improve(weights, moments, rows, rate, jnp.float32(step))
        recent.append(value)
        if (step + 1) % 100 == 0 or step + 1 == training_round.steps:
            mean = sum(float(each) for each in recent) / len(recent)
            seconds = time.monotonic() - began
            print(f"round {number}, step {step + 1}: loss {mean:.4f}, {seconds:.0f} s", flush=True)
            recent = []
    return weights


def write(folder: Path, shape: NetworkShape, weights: Weights, tokenizer: Tokenizer) -> None:
    """Writes the five files of a model folder, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(TURN_END)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape.config(),
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    generation = {"eos_token_id": [end], "pad_token_id": end, "do_sample": False}
    arrays = {name: np.asarray(weight) for name, weight in sorted(weights.items())}
    _write_atomically(folder / "config.json", _json(config))
    _write_atomically(folder / "generation_config.json", _json(generation))
    _write_atomically(folder / "tokenizer.json", tokenizer.to_str().encode())
    _write_atomically(folder / "tokenizer_config.json", _json(make_tokenizer_config()))
    _write_atomically(folder / "model.safetensors", save(arrays, {"format": "pt"}))


def _learning_rate(recipe: TrainingRecipe, training_round: TrainingRound, step: int) -> float:
    """Linear warmup, then a half cosine down to 0."""
    if step < recipe.warmup:
        return training_round.rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, training_round.steps - recipe.warmup)
    return training_round.rate * 0.5 * (1 + math.cos(math.pi * progress))


def _iter_batches(
    recipe: TrainingRecipe, encoded: list[EncodedConversation], rng: random.Random
) -> Iterator[PackedBatch]:
    """Yields batches, epoch after epoch, with short and long rows mixed in an order that depends
    only on `rng`. Conversations that do not fit in a long row are skipped."""
    short = [each for each in encoded if len(each.ids) <= recipe.short]
    long = [each for each in encoded if recipe.short < len(each.ids) <= recipe.long]
    while True:
        epoch: list[PackedBatch] = []
        for length, pool in ((recipe.short, short), (recipe.long, long)):
            rng.shuffle(pool)
            rows = _pack_rows(pool, length)
            height = recipe.batch // length
            for at in range(0, len(rows) - height + 1, height):
                epoch.append(_make_batch(rows[at : at + height], length))
        rng.shuffle(epoch)
        yield from epoch


def _pack_rows(
    pool: list[EncodedConversation], length: int, open_rows: int = 32
) -> list[list[EncodedConversation]]:
    """Packs whole conversations into rows of at most `length` tokens. Each conversation is added to
    the open row in which it leaves the least free space."""
    rows: list[list[EncodedConversation]] = []
    opened: list[tuple[int, list[EncodedConversation]]] = []
    for each in pool:
        fitting = [(room, row) for room, row in opened if room >= len(each.ids)]
        room, row = min(fitting, key=lambda entry: entry[0], default=(length, []))
        if not fitting and len(opened) == open_rows:
            opened.sort(key=lambda entry: entry[0])
            rows.append(opened.pop(0)[1])
        opened = [entry for entry in opened if entry[1] is not row]
        row.append(each)
        opened.append((room - len(each.ids), row))
    return rows + [row for _, row in opened]


def _make_batch(rows: list[list[EncodedConversation]], length: int) -> PackedBatch:
    """Builds a batch. Segments are numbered from 1 in each row; 0 means padding, which is neither
    attended to nor trained on."""
    ids, segments = (np.zeros((len(rows), length + 1), np.int32) for _ in range(2))
    learn = np.zeros((len(rows), length + 1), np.float32)
    for at, row in enumerate(rows):
        end = 0
        for number, each in enumerate(row, start=1):
            span = slice(end, end + len(each.ids))
            ids[at, span], learn[at, span], segments[at, span] = each.ids, each.loss_weights, number
            end = span.stop
    return PackedBatch(ids=ids, segments=segments, loss_weights=learn)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_atomically(path: Path, content: bytes) -> None:
    """Writes a file atomically, so that a server that starts in the meantime never reads a partial
    file."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    os.replace(beside, path)


if __name__ == "__main__":
    main()
