"""The Metal kernel of the gated delta rule, without Metal.

The source of the kernel is compiled as C++. 32 threads are the lanes of a SIMD group, and a sum
over the group waits for all of them. This shows that the source computes the rule. It does not show
that Metal compiles it, or how fast it is.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import gated_delta_metal
from models.gated_delta import CHUNK_LENGTH, gated_delta_chunked
from models.gated_delta_metal import INPUT_NAMES, SOURCE, find_fault
from tests.models.test_gated_delta import formulas

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

HOST = """
#include <barrier>
#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

using uint = unsigned;
using std::exp;
struct uint3 { uint x, y, z; };

static std::barrier barrier(32);
static float lanes[32];

template <int Dk, int Dv, int Hk, int Hv>
void kernel(const float* queries, const float* keys, const float* values, const float* log_decay,
            const float* beta, const float* state, const int& length, float* out, float* new_state,
            uint3 thread_position_in_grid, uint thread_index_in_simdgroup) {
    auto simd_sum = [&](float x) {
        lanes[thread_index_in_simdgroup] = x;
        barrier.arrive_and_wait();
        float sum = 0;
        for (float lane : lanes) sum += lane;
        barrier.arrive_and_wait();
        return sum;
    };
    SOURCE
}

int main(int, char** arguments) {
    constexpr int Dk = KEY_SIZE, Dv = VALUE_SIZE, Hk = KEY_HEADS, Hv = VALUE_HEADS;
    const int batch = BATCH, length = LENGTH;
    const size_t sizes[] = {size_t(batch) * length * Hk * Dk, size_t(batch) * length * Hk * Dk,
                            size_t(batch) * length * Hv * Dv, size_t(batch) * length * Hv,
                            size_t(batch) * length * Hv,      size_t(batch) * Hv * Dv * Dk};
    std::vector<std::vector<float>> in;
    FILE* file = fopen(arguments[1], "rb");
    for (size_t size : sizes) {
        in.emplace_back(size);
        if (fread(in.back().data(), 4, size, file) != size) return 1;
    }
    fclose(file);
    std::vector<float> out(sizes[2], NAN), state(sizes[5], NAN);
    std::vector<std::thread> threads;
    for (uint lane = 0; lane < 32; ++lane) {
        threads.emplace_back([&, lane] {
            for (uint z = 0; z < uint(batch * Hv); ++z)
                for (uint y = 0; y < uint(Dv); ++y)
                    kernel<Dk, Dv, Hk, Hv>(in[0].data(), in[1].data(), in[2].data(), in[3].data(),
                                           in[4].data(), in[5].data(), length, out.data(),
                                           state.data(), {lane, y, z}, lane);
        });
    }
    for (auto& thread : threads) thread.join();
    file = fopen(arguments[2], "wb");
    fwrite(out.data(), 4, out.size(), file);
    fwrite(state.data(), 4, state.size(), file);
    fclose(file);
}
"""

KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 64, 3


def make_inputs(length: int, batch: int, decay: float | None) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(length)
    keys = rng.standard_normal((batch, length, KEY_HEADS, KEY))
    inputs = {
        "queries": rng.standard_normal((batch, length, KEY_HEADS, KEY)),
        "keys": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "values": rng.standard_normal((batch, length, VALUE_HEADS, VALUE)),
        "log_decay": -np.exp(rng.uniform(-8, 2, (batch, length, VALUE_HEADS))),
        "beta": rng.uniform(0, 1, (batch, length, VALUE_HEADS)),
        "state": rng.standard_normal((batch, VALUE_HEADS, VALUE, KEY)),
    }
    if decay is not None:
        inputs["log_decay"][:, ::2] = decay
    return inputs


@pytest.mark.recorded
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("length", "batch", "decay"), [(17, 2, None), (2 * CHUNK_LENGTH + 3, 1, None), (33, 1, -1e4)]
)
def test_the_source_computes_the_rule(
    length: int, batch: int, decay: float | None, tmp_path: Path
) -> None:
    inputs = make_inputs(length, batch, decay)
    names = {
        "SOURCE": SOURCE, "KEY_SIZE": KEY, "VALUE_SIZE": VALUE, "KEY_HEADS": KEY_HEADS,
        "VALUE_HEADS": VALUE_HEADS, "BATCH": batch, "LENGTH": length,
    }  # fmt: skip
    text = HOST
    for name, value in names.items():
        text = text.replace(name, str(value))
    (tmp_path / "host.cpp").write_text(text)
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-std=c++20", "-O1", "-pthread", "-o", tmp_path / "host", tmp_path / "host.cpp"],
        check=True,
    )
    order = INPUT_NAMES[:-1]
    (tmp_path / "in").write_bytes(b"".join(inputs[n].astype(np.float32).tobytes() for n in order))
    subprocess.run([tmp_path / "host", tmp_path / "in", tmp_path / "out"], check=True)
    found = np.fromfile(tmp_path / "out", np.float32)
    expected = formulas(**inputs)
    np.testing.assert_allclose(
        found, np.concatenate([array.ravel() for array in expected]), atol=1e-4
    )


SIZES = {"key_heads": 2, "value_heads": 4, "key_size": 32, "value_size": 6}


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """A function that installs a replacement of the kernel."""

    def install(kernel: Any) -> None:
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(gated_delta_metal, "_kernel", lambda: kernel)

    return install


def compute_by_chunks(*, inputs: list[Any], **_: Any) -> tuple[mx.array, mx.array]:
    return gated_delta_chunked(*inputs[:-1])


def test_a_kernel_with_equal_results_has_no_fault(metal: Callable[[Any], None]) -> None:
    metal(compute_by_chunks)
    assert find_fault(**SIZES) is None


def test_a_kernel_with_other_results_is_found(metal: Callable[[Any], None]) -> None:
    def wrong(**call: Any) -> tuple[mx.array, mx.array]:
        out, state = compute_by_chunks(**call)
        return out, state * 1.1

    metal(wrong)
    assert "its results differ by " in str(find_fault(**SIZES))


def test_nan_is_a_fault(metal: Callable[[Any], None]) -> None:
    def wrong(**call: Any) -> tuple[mx.array, mx.array]:
        out, state = compute_by_chunks(**call)
        return out * float("nan"), state

    metal(wrong)
    assert find_fault(**SIZES) is not None


def test_a_kernel_that_does_not_compile_is_found(metal: Callable[[Any], None]) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("error: unknown type\nin line 3")

    metal(fail)
    assert find_fault(**SIZES) == "it fails: error: unknown type"


def test_other_sizes_and_devices_have_no_kernel(metal: Callable[[Any], None]) -> None:
    assert find_fault(**SIZES) == "it is written for Metal"
    metal(compute_by_chunks)
    assert "40 are not a multiple of 32" in str(find_fault(**{**SIZES, "key_size": 40}))
