"""With the kernels, the bits of a sequence's logits depend only on the sequence.

They do not depend on the other rows of a batch, on chunks, on the positions that are selected, on
copied or trimmed caches, the number of threads, or synchronisation, for all architectures. The docs
promise this for prefix caches and batches on a CPU.

Caches are copied and trimmed while earlier steps are still evaluated, so the test also detects
writes to memory that has yet to be read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten

from models import architectures, kernels, mlx_lm_adapter
from models.base import Model
from models.batch_cache import PackedKVCache
from models.checkpoint_config import get_text_config
from models.cpu_layout import apply_cpu_layout, is_batch_invariant, set_activation_bits
from models.kv import KVBuffers, LayerCache
from models.quant import replace_leaves
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.test_precision import PRECISE
from tests.rows import rows

OPS = kernels.ops()
pytestmark = [
    pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}"),
    pytest.mark.recorded,
]

# type of plain weights; for packed weights, the type of scales, bits, and bits of activations.
# Keys and values have the same type, as `--kv auto` selects.
KINDS: Mapping[str, tuple[mx.Dtype, int | None, int]] = {
    "float32": (mx.float32, None, 24),
    "bfloat16": (mx.bfloat16, None, 24),
    "float16": (mx.float16, None, 24),
    "affine-4": (mx.bfloat16, 4, 24),
    "affine-8": (mx.float16, 8, 24),
    "affine-4-a8": (mx.bfloat16, 4, 8),
    "affine-8-a16": (mx.float16, 8, 16),
}

# If the bits of a model depend on chunks, a number may be stored as one of two neighbours.
KV_TOLERANCES = {mx.bfloat16: 0.1, mx.float16: 0.02}

# Architectures whose logits are equal only up to rounding: those with two forms of a computation,
# and those that run in mlx-lm's classes, where the kernels replace only layers with weights.
TWO_WAYS = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k2",
    "mistral4",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)
FOREIGN = ("float32", "affine-4")

# length, longer than all windows; number of texts; number of rows
LENGTH, TEXTS, ROWS = 45, 3, 8


@dataclass(frozen=True, kw_only=True)
class Reference:
    """texts: LENGTH ids each. logits: of each text at all positions, [LENGTH, V], evaluated alone,
    in one chunk, on one thread."""

    case: Case
    model: Model
    texts: Sequence[Sequence[int]]
    logits: Sequence[np.ndarray]


def is_foreign(case: Case) -> bool:
    return isinstance(
        architectures._find_architecture(get_text_config(case.config), case.config),
        mlx_lm_adapter.Architecture,
    )


def has_two_ways(case: Case) -> bool:
    kinds = {case.config["model_type"], get_text_config(case.config)["model_type"]}
    return not kinds.isdisjoint(TWO_WAYS)


def can_pack(model: Model) -> bool:
    return is_batch_invariant(model) and all(isinstance(one, KVBuffers) for one in model.make_kv())


def get_tolerance(reference: Reference) -> float:
    """Accepted difference of logits."""
    if is_batch_invariant(reference.model):
        return 0.0
    own = parity.tolerance(reference.case)
    kv = reference.model.kv_dtype
    return own if kv is None else max(own, KV_TOLERANCES[kv])


def list_kinds(case: Case) -> Sequence[str]:
    """With fewer bits of activations, two forms of a computation differ beyond the tolerance."""
    if is_foreign(case):
        return FOREIGN
    return [kind for kind, (*_, bits) in KINDS.items() if bits == 24 or not has_two_ways(case)]


def build_model(case: Case, dtype: mx.Dtype, bits: int | None, activations: int = 24) -> Model:
    config = get_text_config(case.config)
    architecture = architectures._find_architecture(config, case.config)
    model: Any = architecture.Model(architecture.Config.from_dict(config))
    parity.draw_weights(model, seed=0)
    flat: Any = tree_flatten(model.parameters())
    model.update(
        tree_unflatten([(name, a.astype(dtype)) for name, a in flat if not name.endswith(PRECISE)])
    )
    if bits is not None:
        replace_leaves(model, lambda _, layer: quantize_layer(layer, bits))
    mx.eval(model.parameters())
    model.kv_dtype = None if dtype == mx.float32 else dtype
    apply_cpu_layout(model)
    set_activation_bits(model, activations)
    return model


def quantize_layer(layer: Any, bits: int) -> Any:
    if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % 32:
        return layer
    return layer.to_quantized(32, bits)


def list_references() -> list[Any]:
    """All cases with all kinds of weights. Of each architecture, only the first case with one kind
    is not exhaustive; the architectures take turns with the kinds."""
    seen = set[str]()
    found = list[Any]()
    for case in cases():
        kinds, architecture = list_kinds(case), case.config["model_type"]
        chosen = None if architecture in seen else kinds[len(seen) % len(kinds)]
        seen.add(architecture)
        found += [
            pytest.param(
                (case, kind),
                id=f"{case.id}-{kind}",
                marks=() if kind == chosen else pytest.mark.exhaustive,
            )
            for kind in kinds
        ]
    return found


@pytest.fixture(scope="module", params=list_references())
def reference(request: pytest.FixtureRequest) -> Reference:
    case, kind = request.param
    model = build_model(case, *KINDS[kind])
    texts = [parity.ids(case, LENGTH, seed=seed) for seed in range(TEXTS)]
    before = OPS.num_threads()
    OPS.set_num_threads(1)
    logits = [parity.prefill(model, text, [LENGTH]) for text in texts]
    OPS.set_num_threads(before)
    return Reference(case=case, model=model, texts=texts, logits=logits)


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = OPS.num_threads()
    yield
    OPS.set_num_threads(before)


@dataclass(kw_only=True)
class Row:
    """text: index of the text. at: number of evaluated ids."""

    text: int
    kv: list[LayerCache]
    at: int = 0


@dataclass(kw_only=True)
class Simulation:
    """Operations on rows. results: (text, first position, logits [L, V])."""

    reference: Reference
    rows: list[Row]
    results: list[tuple[int, int, mx.array]] = field(default_factory=list)

    def evaluate(self, row: int, length: int, skipped: int = 0) -> None:
        """skipped: the number of positions that are not selected, if there are more."""
        one = self.rows[row]
        ids = self.reference.texts[one.text][one.at : one.at + length]
        if not ids:
            return
        first = min(skipped, len(ids) - 1)
        hidden = self.reference.model(mx.array([ids]), one.kv, lambda hidden: hidden[:, first:])
        self._record(one, self.reference.model.logits(hidden)[0], first)

    def evaluate_batch(self, rows: Sequence[int]) -> None:
        """Evaluate one position of each unfinished row. New rows are prefilled first."""
        for row in rows:
            if self.rows[row].at == 0:
                self.evaluate(row, row + 1)
        ready = [self.rows[row] for row in rows if self.rows[row].at < LENGTH]
        if not ready:
            return
        ids = [[self.reference.texts[one.text][one.at]] for one in ready]
        layers = zip(*(one.kv for one in ready), strict=True)
        offsets = mx.array([one.at for one in ready])
        hidden = self.reference.model(
            mx.array(ids), [layer[0].make_batch(layer, offsets) for layer in layers]
        )
        for one, logits in zip(ready, self.reference.model.logits(hidden), strict=True):
            self._record(one, logits)

    def evaluate_packed(self, chunks: Mapping[int, int], last: bool = False) -> None:
        """Evaluate the next positions of several rows in one forward pass, as the engine does with
        short prompts. chunks: the row and the number of its positions. last: select only the last
        position of each row."""
        if not can_pack(self.reference.model):
            return
        ready = [(self.rows[row], min(n, LENGTH - self.rows[row].at)) for row, n in chunks.items()]
        ready = [(one, count) for one, count in ready if count]
        if not ready:
            return
        places = [range(one.at, one.at + count) for one, count in ready]
        texts = [self.reference.texts[one.text] for one, _ in ready]
        ids = [[text[i]] for text, place in zip(texts, places, strict=True) for i in place]
        offsets = mx.array([i for place in places for i in place])
        layers: Any = zip(*(one.kv for one, _ in ready), strict=True)
        counts = [count for _, count in ready]
        kv = [PackedKVCache(layer, counts, offsets) for layer in layers]
        ends = list(accumulate(counts))
        selected = mx.array([end - 1 for end in ends] if last else list(range(ends[-1])))
        hidden = self.reference.model(mx.array(ids), kv, lambda hidden: hidden[selected])
        logits = self.reference.model.logits(hidden)[:, 0]
        for i, ((one, count), end) in enumerate(zip(ready, ends, strict=True)):
            found = logits[i : i + 1] if last else logits[end - count : end]
            self._record(one, found, count - len(found))

    def trim(self, row: int, count: int) -> None:
        one = self.rows[row]
        if count < one.at and all(layer.can_trim(count) for layer in one.kv):
            for layer in one.kv:
                layer.trim(count)
            one.at -= count

    def fork(self, row: int, source: int) -> None:
        """Copy the caches of another row, like a prefix from the prefix cache."""
        one = self.rows[source]
        self.rows[row] = Row(text=one.text, kv=[layer.copy() for layer in one.kv], at=one.at)

    def rejoin_slices(self, row: int, cut: int) -> None:
        """Join the caches from two slices, like a prefix with two parts in the prefix cache."""
        one = self.rows[row]
        if not 0 < cut < one.at or not all(layer.sliceable for layer in one.kv):
            return
        kv = self.reference.model.make_kv()
        for new, old in zip(kv, one.kv, strict=True):
            for part in (old.slice(0, cut), old.slice(cut, one.at)):
                new.append(part, 0, part.offset)
        one.kv = kv

    def _record(self, row: Row, logits: mx.array, skipped: int = 0) -> None:
        self.results.append((row.text, row.at + skipped, logits))
        row.at += skipped + len(logits)


ROW = st.integers(0, ROWS - 1)
ACTIONS = st.one_of(
    st.tuples(
        st.just(Simulation.evaluate_batch), st.lists(ROW, min_size=2, max_size=ROWS, unique=True)
    ),
    st.tuples(st.just(Simulation.evaluate_batch), st.just(list(range(ROWS)))),
    st.tuples(st.just(Simulation.evaluate), ROW, st.integers(1, 30), st.integers(0, 30)),
    st.tuples(
        st.just(Simulation.evaluate_packed),
        st.dictionaries(ROW, st.integers(1, 30), min_size=2, max_size=ROWS),
        st.booleans(),
    ),
    st.tuples(st.just(Simulation.fork), ROW, ROW),
    st.tuples(st.just(Simulation.trim), ROW, st.integers(1, 20)),
    st.tuples(st.just(Simulation.rejoin_slices), ROW, st.integers(1, LENGTH)),
)
# before the next action, evaluate everything, start the evaluation, or do neither
WAITS = st.sampled_from([mx.eval, mx.async_eval, mx.async_eval, None])


# mlx-lm's classes in which every operation is one of ours
INVARIANT_CLASSES = frozenset({"cohere2", "internlm2", "olmoe", "starcoder2"})


@pytest.mark.product
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_most_models_are_batch_invariant(case: Case) -> None:
    own_way = is_foreign(case) and case.config["model_type"] not in INVARIANT_CLASSES
    expected = not own_way and not has_two_ways(case)
    assert is_batch_invariant(build_model(case, mx.float32, None)) == expected


@rows("kind", KINDS)
@rows("name", ["llama-plain", "gemma3_text", "mixtral", "gpt_oss"])
def test_packed_prompts_have_the_bits_of_separate_prompts(name: str, kind: str) -> None:
    """Of any lengths, including longer than the windows and the limit of the fused operations,
    twice in a row, and with cached positions."""
    case = next(case for case in cases() if case.id.startswith(name))
    model = build_model(case, *KINDS[kind])
    assert can_pack(model)
    texts = [parity.ids(case, LENGTH, seed=seed) for seed in range(TEXTS)]
    logits = [parity.prefill(model, text, [LENGTH]) for text in texts]
    reference = Reference(case=case, model=model, texts=texts, logits=logits)
    rows = [Row(text=i % TEXTS, kv=model.make_kv()) for i in range(ROWS)]
    simulation = Simulation(reference=reference, rows=rows)
    simulation.evaluate(1, 7)
    simulation.evaluate_packed({0: 1, 1: 20, 2: 33, 3: 5})
    simulation.evaluate_packed({2: 3, 0: 8, 4: 2, 5: 13})
    simulation.evaluate_packed({1: 4, 5: 9, 3: 1}, last=True)
    simulation.evaluate_batch(range(6))
    assert len(simulation.results) > 12
    for text, start, got in simulation.results:
        np.testing.assert_array_equal(np.array(got), logits[text][start : start + len(got)])


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_model_with_unsupported_weights_is_not_batch_invariant(bits: int) -> None:
    [case] = [case for case in cases() if case.id == "llama-plain"]
    assert is_batch_invariant(build_model(case, mx.bfloat16, bits)) == (bits != 3)


@settings(max_examples=3)
@given(
    actions=st.lists(st.tuples(ACTIONS, WAITS), min_size=10, max_size=24), threads=st.integers(1, 2)
)
def test_the_logits_of_a_position_do_not_depend_on_the_operations(
    reference: Reference, actions: list[Any], threads: int
) -> None:
    mx.synchronize()
    OPS.set_num_threads(threads)
    rows = [Row(text=i % TEXTS, kv=reference.model.make_kv()) for i in range(ROWS)]
    simulation = Simulation(reference=reference, rows=rows)
    for (action, *arguments), wait in actions:
        action(simulation, *arguments)
        if wait is not None and simulation.results:
            wait(
                simulation.results[-1][-1],
                [layer.state() for row in simulation.rows for layer in row.kv],
            )
    for text, start, logits in simulation.results:
        expected = reference.logits[text][start : start + len(logits)]
        np.testing.assert_allclose(
            np.array(logits), expected, rtol=0, atol=get_tolerance(reference)
        )
