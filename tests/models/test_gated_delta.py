"""The gated delta rule: both forms agree with its formulas."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import gated_delta
from tests.rows import rows

Form = Callable[..., tuple[mx.array, mx.array]]

FORMS = pytest.mark.parametrize(
    "form", [gated_delta.gated_delta_recurrent, gated_delta.gated_delta_chunked]
)

KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 8, 6


def make_inputs(seed: int, length: int, batch: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    """Keys of length one, beta from 0 to 1, decay from almost none to almost complete, and a state
    that is not zero."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((batch, length, KEY_HEADS, KEY))
    return {
        "queries": rng.standard_normal((batch, length, KEY_HEADS, KEY)),
        "keys": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "values": rng.standard_normal((batch, length, VALUE_HEADS, VALUE)),
        "log_decay": -np.exp(rng.uniform(-8, 2, (batch, length, VALUE_HEADS))),
        "beta": rng.uniform(0, 1, (batch, length, VALUE_HEADS)),
        "state": rng.standard_normal((batch, VALUE_HEADS, VALUE, KEY)),
    }


def formulas(
    queries: np.ndarray[Any, Any],
    keys: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    log_decay: np.ndarray[Any, Any],
    beta: np.ndarray[Any, Any],
    state: np.ndarray[Any, Any],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The rule in float64, head by head and position by position."""
    out, after = np.zeros(values.shape), state.copy()
    for row, head in np.ndindex(values.shape[0], values.shape[2]):
        memory, key_head = state[row, head], head // (values.shape[2] // keys.shape[2])
        for t in range(values.shape[1]):
            key = keys[row, t, key_head]
            memory = np.exp(log_decay[row, t, head]) * memory
            correction = beta[row, t, head] * (values[row, t, head] - memory @ key)
            memory = memory + np.outer(correction, key)
            out[row, t, head] = memory @ queries[row, t, key_head]
        after[row, head] = memory
    return out, after


def assert_follows(form: Form, inputs: dict[str, np.ndarray[Any, Any]]) -> None:
    expected = formulas(**inputs)
    got = form(**{name: mx.array(array.astype(np.float32)) for name, array in inputs.items()})
    for ours, exact in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.array(ours), exact, atol=1e-4)


@FORMS
@given(
    seed=st.integers(0, 99),
    length=st.integers(1, 2 * gated_delta.CHUNK_LENGTH + 3),
    batch=st.integers(1, 3),
)
def test_both_forms_agree_with_the_formulas(form: Form, seed: int, length: int, batch: int) -> None:
    assert_follows(form, make_inputs(seed, length, batch))


@FORMS
@rows("length", [1, 7, gated_delta.CHUNK_LENGTH, gated_delta.CHUNK_LENGTH + 1])
@rows("log_gate", [0.0, -1e-7, -90.0, -1e4])
@rows("step", [0.0, 1.0])
def test_extreme_gates_and_steps_keep_the_precision(
    form: Form, length: int, log_gate: float, step: float
) -> None:
    """exp(-90) squared is zero in float32, and the quotient of two such products is NaN."""
    inputs = make_inputs(0, length)
    inputs["log_decay"][:, ::2] = log_gate
    inputs["beta"][:, ::3] = step
    assert_follows(form, inputs)


@FORMS
def test_repeated_keys_keep_the_precision(form: Form) -> None:
    """Equal keys without decay: the matrix of the system is all ones below its diagonal, and the
    series that would invert it has terms of 10^8 that cancel."""
    inputs = make_inputs(1, 2 * gated_delta.CHUNK_LENGTH)
    inputs["keys"][:] = inputs["keys"][:, :1]
    inputs["log_decay"][:], inputs["beta"][:] = 0.0, 1.0
    assert_follows(form, inputs)


@pytest.mark.parametrize(
    "pieces",
    [
        [40, 40],
        [1, 79],
        [79, 1],
        [gated_delta.MAX_RECURRENT_LENGTH, 80 - gated_delta.MAX_RECURRENT_LENGTH],
    ],
)
def test_a_sequence_can_be_evaluated_in_any_chunks(pieces: list[int]) -> None:
    inputs = make_inputs(2, 80)
    expected, after = formulas(**inputs)
    arrays = {name: mx.array(array.astype(np.float32)) for name, array in inputs.items()}
    state, start, outs = arrays.pop("state"), 0, list[mx.array]()
    for length in pieces:
        part = {name: array[:, start : start + length] for name, array in arrays.items()}
        out, state = gated_delta.gated_delta(**part, state=state)
        outs.append(out)
        start += length
    np.testing.assert_allclose(np.array(mx.concatenate(outs, axis=1)), expected, atol=1e-4)
    np.testing.assert_allclose(np.array(state), after, atol=1e-4)
