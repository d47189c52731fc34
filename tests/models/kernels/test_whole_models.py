"""A sequence's numbers depend on nothing but the sequence, to the bit.

With the kernels, whatever a model is made of: alone or beside others who come and go, in one piece
or any, behind a copy of another's cache, after a step back and again, on one thread or two, waited
for or not. What the docs promise of prefix caches and batches on a CPU is this.

Copies are taken, and steps back, while the steps before are still being worked on: whoever writes
to memory that somebody has yet to read is caught here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten

import models
from models import kernels, mlx_lm_adapter
from models.base import Model
from models.cpu_layout import apply_cpu_layout, is_batch_invariant
from models.kv import LayerCache
from models.multimodal import get_text_config
from models.quant import replace_leaves
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.test_precision import PRECISE

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")

# of plain weights, the type; of packed ones, bits and the type of their scales
KINDS: Mapping[str, tuple[mx.Dtype, int | None]] = {
    "float32": (mx.float32, None),
    "bfloat16": (mx.bfloat16, None),
    "float16": (mx.float16, None),
    "affine-4": (mx.bfloat16, 4),
    "affine-8": (mx.float16, 8),
}

# What is not to the bit however it is reached, only beside others what it would be alone: what has
# two ways to the same numbers, and what runs through mlx-lm's classes, of which only layers of
# weights are the kernels'.
TWO_WAYS = ("glm4_moe_lite", "qwen3_next", "qwen3_5", "qwen3_5_moe")
FOREIGN = ("float32", "affine-4")

# longer than any case's window; how many different ones; sequences side by side
LENGTH, TEXTS, ROWS = 45, 3, 8


@dataclass(frozen=True, kw_only=True)
class Served:
    """texts: of LENGTH ids each. whole: of each, the logits at all positions, [LENGTH, V],
    evaluated at once, by itself, on one thread."""

    case: Case
    model: Model
    texts: Sequence[Sequence[int]]
    whole: Sequence[np.ndarray]


def is_foreign(case: Case) -> bool:
    return isinstance(
        models._find_architecture(get_text_config(case.config)), mlx_lm_adapter.Architecture
    )


def near(served: Served) -> float:
    """How far logits may be from each other."""
    return 0.0 if is_batch_invariant(served.model) else parity.tolerance(served.case)


def opened(case: Case, dtype: mx.Dtype, bits: int | None) -> Model:
    config = get_text_config(case.config)
    architecture = models._find_architecture(config)
    made: Any = architecture.Model(architecture.Config.from_dict(config))
    parity.drawn(made, seed=0)
    flat: Any = tree_flatten(made.parameters())
    made.update(
        tree_unflatten([(name, a.astype(dtype)) for name, a in flat if not name.endswith(PRECISE)])
    )
    if bits is not None:
        replace_leaves(made, lambda _, layer: packed(layer, bits))
    mx.eval(made.parameters())
    apply_cpu_layout(made)
    return made


def packed(layer: Any, bits: int) -> Any:
    if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % 32:
        return layer
    return layer.to_quantized(32, bits)


@pytest.fixture(
    scope="module",
    params=[(c, kind) for c in cases() for kind in (FOREIGN if is_foreign(c) else KINDS)],
    ids=lambda param: f"{param[0].id}-{param[1]}",
)
def served(request: pytest.FixtureRequest) -> Served:
    case, kind = request.param
    model = opened(case, *KINDS[kind])
    texts = [parity.ids(case, LENGTH, seed=seed) for seed in range(TEXTS)]
    before = OPS.threads()
    OPS.use_threads(1)
    whole = [parity.our_prefilled(model, text, [LENGTH]) for text in texts]
    OPS.use_threads(before)
    return Served(case=case, model=model, texts=texts, whole=whole)


@pytest.fixture(autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    before = OPS.threads()
    yield
    OPS.use_threads(before)


@dataclass(kw_only=True)
class Row:
    """text: its number. at: so many of its ids have been evaluated."""

    text: int
    kv: list[LayerCache]
    at: int = 0


@dataclass(kw_only=True)
class Play:
    """What rows do. found: (text, first position, logits [L, V])."""

    served: Served
    rows: list[Row]
    found: list[tuple[int, int, mx.array]] = field(default_factory=list)

    def alone(self, row: int, length: int) -> None:
        one = self.rows[row]
        ids = self.served.texts[one.text][one.at : one.at + length]
        if not ids:
            return
        hidden = self.served.model(mx.array([ids]), one.kv)
        self._find(one, self.served.model.logits(hidden)[0])

    def together(self, rows: Sequence[int]) -> None:
        """Rows that have ended stay away, and those that have not begun do that first."""
        for row in rows:
            if self.rows[row].at == 0:
                self.alone(row, row + 1)
        ready = [self.rows[row] for row in rows if self.rows[row].at < LENGTH]
        if not ready:
            return
        ids = [[self.served.texts[one.text][one.at]] for one in ready]
        layers = zip(*(one.kv for one in ready), strict=True)
        offsets = mx.array([one.at for one in ready])
        hidden = self.served.model(
            mx.array(ids), [layer[0].make_batch(layer, offsets) for layer in layers]
        )
        for one, logits in zip(ready, self.served.model.logits(hidden), strict=True):
            self._find(one, logits)

    def back(self, row: int, count: int) -> None:
        one = self.rows[row]
        if count < one.at and all(layer.can_trim(count) for layer in one.kv):
            for layer in one.kv:
                layer.trim(count)
            one.at -= count

    def fork(self, row: int, source: int) -> None:
        """As a prefix that is in the cache is lent to another."""
        one = self.rows[source]
        self.rows[row] = Row(text=one.text, kv=[layer.copy() for layer in one.kv], at=one.at)

    def pieces(self, row: int, cut: int) -> None:
        """As a prefix that lies in the cache in two parts is put together."""
        one = self.rows[row]
        if not 0 < cut < one.at or not all(layer.sliceable for layer in one.kv):
            return
        made = self.served.model.make_kv()
        for new, old in zip(made, one.kv, strict=True):
            for part in (old.slice(0, cut), old.slice(cut, one.at)):
                new.append(part, 0, part.offset)
        one.kv = made

    def _find(self, row: Row, logits: mx.array) -> None:
        self.found.append((row.text, row.at, logits))
        row.at += len(logits)


ROW = st.integers(0, ROWS - 1)
ACTS = st.one_of(
    st.tuples(st.just(Play.together), st.lists(ROW, min_size=2, max_size=ROWS, unique=True)),
    st.tuples(st.just(Play.together), st.just(list(range(ROWS)))),
    st.tuples(st.just(Play.alone), ROW, st.integers(1, 30)),
    st.tuples(st.just(Play.fork), ROW, ROW),
    st.tuples(st.just(Play.back), ROW, st.integers(1, 20)),
    st.tuples(st.just(Play.pieces), ROW, st.integers(1, LENGTH)),
)
# what is waited for before the next act: all so far, nothing, or not even begun
WAITS = st.sampled_from([mx.eval, mx.async_eval, mx.async_eval, None])


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_most_models_promise_bits(case: Case) -> None:
    promised = not is_foreign(case) and case.config["model_type"] not in TWO_WAYS
    assert is_batch_invariant(opened(case, mx.float32, None)) == promised


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_weights_that_the_kernels_cannot_read_promise_none(bits: int) -> None:
    [case] = [case for case in cases() if case.id == "llama-plain"]
    assert is_batch_invariant(opened(case, mx.bfloat16, bits)) == (bits != 3)


@settings(max_examples=3)
@given(acts=st.lists(st.tuples(ACTS, WAITS), min_size=10, max_size=24), threads=st.integers(1, 2))
def test_a_position_has_the_same_logits_however_it_is_reached(
    served: Served, acts: list[Any], threads: int
) -> None:
    mx.synchronize()
    OPS.use_threads(threads)
    rows = [Row(text=i % TEXTS, kv=served.model.make_kv()) for i in range(ROWS)]
    play = Play(served=served, rows=rows)
    for (act, *said), wait in acts:
        act(play, *said)
        if wait is not None and play.found:
            wait(play.found[-1][-1], [layer.state() for row in play.rows for layer in row.kv])
    for text, start, logits in play.found:
        wanted = served.whole[text][start : start + len(logits)]
        np.testing.assert_allclose(np.array(logits), wanted, rtol=0, atol=near(served))
