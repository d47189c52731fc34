"""The thread pool of the kernels: number of threads, completion, and idle CPU time."""

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
pytestmark = pytest.mark.skipif(OPS is None, reason=f"no kernels: {kernels.describe().why}")


@pytest.fixture
def with_three_threads() -> Iterator[None]:
    before = OPS.num_threads()
    OPS.set_num_threads(3)
    yield
    OPS.set_num_threads(before)


def threads_of(variables: dict[str, str], prepare: str = "") -> int:
    env = {name: value for name, value in os.environ.items() if name != "MLXRUNNER_THREADS"}
    program = (
        f"import os; {prepare}\nfrom models import kernels; print(kernels.ops().num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**env, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_the_default_number_of_threads_is_the_number_of_allowed_cores() -> None:
    assert threads_of({}) == get_num_threads({})


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the platform has no CPU affinity")
def test_a_process_bound_to_one_cpu_has_one_thread() -> None:
    assert threads_of({}, "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})") == 1


def test_the_variable_sets_the_number_of_threads() -> None:
    assert threads_of({"MLXRUNNER_THREADS": "5"}) == 5


@pytest.mark.usefixtures("with_three_threads")
@pytest.mark.parametrize("count", [0, -1, MAX_THREADS + 1])
def test_an_invalid_number_of_threads_is_refused_and_changes_nothing(count: int) -> None:
    with pytest.raises(
        ValueError, match=f"^{count} is not a number of threads up to {MAX_THREADS}$"
    ):
        OPS.set_num_threads(count)
    assert OPS.num_threads() == 3


@pytest.mark.usefixtures("with_three_threads")
def test_the_maximum_number_of_threads_can_be_set() -> None:
    OPS.set_num_threads(MAX_THREADS)
    assert OPS.num_threads() == MAX_THREADS


@pytest.mark.usefixtures("with_three_threads")
def test_thousands_of_small_products_finish() -> None:
    product = OPS.Matmul(OPS.repack(mx.random.normal((512, 512), scale=0.04)))
    x = mx.random.normal((1, 512))
    for _ in range(10):
        for _ in range(300):
            x = product(x)
        mx.eval(x)
    assert np.isfinite(np.array(x)).all()


@pytest.mark.usefixtures("with_three_threads")
def test_two_threads_can_evaluate_at_the_same_time() -> None:
    weight = np.random.default_rng(0).standard_normal((700, 512)).astype(np.float32)
    rows = np.random.default_rng(1).standard_normal((9, 512)).astype(np.float32)
    expected = np.array(OPS.Matmul(OPS.repack(mx.array(weight)))(mx.array(rows)))
    wrong: list[int] = []
    done: list[int] = []

    def evaluate(number: int) -> None:
        mx.set_default_stream(mx.new_stream(mx.cpu))
        product = OPS.Matmul(OPS.repack(mx.array(weight)))
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


@pytest.mark.usefixtures("with_three_threads")
@pytest.mark.timing
def test_idle_threads_use_no_cpu_time() -> None:
    product = OPS.Matmul(OPS.repack(mx.random.normal((2048, 1024))))
    for _ in range(20):
        mx.eval(product(mx.random.normal((4, 1024))))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - before
    print(f"{1000 * used:.0f} ms of CPU time in half a second")
    assert used < 0.05
