"""The threads that products are shared among: how many, that they finish, and that they sleep."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from models import kernels
from models.cpu_backend import MAX_THREADS, get_num_threads

OPS = kernels.ops()
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels here: {kernels.describe().why}")


@pytest.fixture
def shared_by_three() -> Iterator[None]:
    before = OPS.threads()
    OPS.use_threads(3)
    yield
    OPS.use_threads(before)


def threads_of(variables: dict[str, str], prepare: str = "") -> int:
    env = {name: value for name, value in os.environ.items() if name != "MLXRUNNER_THREADS"}
    program = f"import os; {prepare}\nfrom models import kernels; print(kernels.ops().threads())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**env, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_there_are_as_many_threads_as_cores_that_are_ours() -> None:
    assert threads_of({}) == get_num_threads({})


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity cannot be set here")
def test_a_process_that_is_bound_to_one_cpu_has_one_thread() -> None:
    assert threads_of({}, "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})") == 1


def test_whoever_asks_for_a_number_of_threads_gets_it() -> None:
    assert threads_of({"MLXRUNNER_THREADS": "5"}) == 5


@pytest.mark.usefixtures("shared_by_three")
@pytest.mark.parametrize("count", [0, -1, MAX_THREADS + 1])
def test_what_is_no_number_of_threads_is_refused_and_changes_nothing(count: int) -> None:
    with pytest.raises(
        ValueError, match=f"^{count} is not a number of threads up to {MAX_THREADS}$"
    ):
        OPS.use_threads(count)
    assert OPS.threads() == 3


@pytest.mark.usefixtures("shared_by_three")
def test_the_most_threads_that_may_be_asked_for_are_had() -> None:
    OPS.use_threads(MAX_THREADS)
    assert OPS.threads() == MAX_THREADS


@pytest.mark.usefixtures("shared_by_three")
def test_thousands_of_small_products_finish() -> None:
    product = OPS.Product(OPS.strips(mx.random.normal((512, 512), scale=0.04)))
    x = mx.random.normal((1, 512))
    for _ in range(10):
        for _ in range(300):
            x = product(x)
        mx.eval(x)
    assert np.isfinite(np.array(x)).all()


@pytest.mark.usefixtures("shared_by_three")
def test_two_threads_that_evaluate_at_once_both_finish_and_are_right() -> None:
    weight = np.random.default_rng(0).standard_normal((700, 512)).astype(np.float32)
    rows = np.random.default_rng(1).standard_normal((9, 512)).astype(np.float32)
    expected = np.array(OPS.Product(OPS.strips(mx.array(weight)))(mx.array(rows)))
    wrong: list[int] = []
    done: list[int] = []

    def evaluate(number: int) -> None:
        mx.set_default_stream(mx.new_stream(mx.cpu))
        product = OPS.Product(OPS.strips(mx.array(weight)))
        for _ in range(300):
            if not (np.array(product(mx.array(rows))) == expected).all():
                wrong.append(number)
        done.append(number)

    callers = [threading.Thread(target=evaluate, args=(n,), daemon=True) for n in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert sorted(done) == [0, 1]
    assert not wrong


@pytest.mark.usefixtures("shared_by_three")
def test_threads_that_have_nothing_to_do_take_no_time() -> None:
    product = OPS.Product(OPS.strips(mx.random.normal((2048, 1024))))
    for _ in range(20):
        mx.eval(product(mx.random.normal((4, 1024))))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
