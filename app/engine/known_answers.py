"""Compares the operations that a model uses on a GPU with the same operations on the CPU.

Knows: MLX's operations, the formats of a model's weights, the shapes of its attention. Must not
know: requests, memory, how a model is loaded.

A wrong kernel gives fluent nonsense rather than an error. Both devices exist in the same process,
so a few small operations with a known answer show this in milliseconds: products with one, 16 and
512 rows for each format of the weights, attention for each head size, and a rotation. The tests of
this module run on two CPU streams with injected errors. It has not been run on Metal or CUDA.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from models.attention_route import AttentionShape
from models.base import Model
from models.kv import LayerCache
from models.sdpa import scaled_dot_product_attention

_ROWS = (1, 16, 512)
_WIDTH, _OUTPUTS = 512, 256
_POSITIONS = 256

# The largest accepted relative error (root mean square) for each type. Sums are float32 on all
# devices, so the error is the rounding of the inputs and of the result. TF32 rounds float32 inputs
# to 10 bits.
_TOLERANCES: Mapping[mx.Dtype, float] = {mx.float32: 5e-3, mx.float16: 1e-2, mx.bfloat16: 3e-2}

# The number of seconds in which any GPU computes one of these operations once it is compiled.
_SLOW_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The format of weights. mode: None for weights that are not quantized."""

    mode: str | None
    bits: int = 0
    group_size: int = 0

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit" if self.mode else "unquantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """An operation with a known answer. build: builds the result on the current device, always with
    the same inputs. reference: builds the known answer on the CPU, if another operation is faster
    there."""

    name: str
    build: Callable[[], mx.array]
    reference: Callable[[], mx.array] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """The result of a check. wrong: the operations with wrong results. warnings: operations that
    are missing or slow. Both are sentences."""

    wrong: Sequence[str]
    warnings: Sequence[str]


def list_known_answers(model: Model, layers: Sequence[LayerCache]) -> Iterator[KnownAnswer]:
    """Yields the operations that the model uses. layers: the caches of a sequence with several
    positions, which may be unevaluated."""
    assert isinstance(model, nn.Module)
    dtype = _activation_type(model)
    for form in sorted(_weight_formats(model), key=str):
        for rows in _ROWS:
            yield _make_product(form, rows, dtype)
    shapes = {shape for layer in layers for shape in layer.attention_shapes if not shape.absorbed}
    for shape in sorted(shapes, key=repr):
        for length in (1, 32):
            yield KnownAnswer(
                name=f"attention of {length} queries with head size {shape.key_dim}",
                build=lambda shape=shape, length=length: _build_attention(shape, length, dtype),
            )
    yield KnownAnswer(name="rotation of positions", build=lambda: _build_rope(dtype))


def check_device(
    answers: Sequence[KnownAnswer],
    *,
    device: mx.Stream | mx.Device,
    reference: mx.Stream | mx.Device,
    clock: Callable[[], float] = time.perf_counter,
) -> DeviceCheck:
    """Computes each operation on both devices."""
    wrong: list[str] = []
    warnings: list[str] = []
    for answer in answers:
        with mx.stream(reference):
            expected = (answer.reference or answer.build)()
            mx.eval(expected)
        try:
            with mx.stream(device):
                mx.eval(answer.build())  # compiles the kernel
                began = clock()
                found = answer.build()
                mx.eval(found)
                taken = clock() - began
        except (RuntimeError, ValueError) as error:
            summary = str(error).partition("\n")[0]
            warnings.append(f"{answer.name} fails on the device: {summary}")
            continue
        with mx.stream(reference):
            error = _relative_error(found, expected)
        if not error <= _TOLERANCES[expected.dtype]:
            wrong.append(f"{answer.name} has a relative error of {error:.2g}")
        elif taken > _SLOW_SECONDS:
            warnings.append(f"{answer.name} takes {taken * 1000:.0f} ms on the device")
    return DeviceCheck(wrong=wrong, warnings=warnings)


def check_model_on_gpu(model: Model) -> DeviceCheck:
    """Checks the operations of a model on the default device. On a CPU, there is no second
    implementation to compare with, so nothing is checked."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return DeviceCheck(wrong=(), warnings=())
    layers = model.make_kv()
    # not evaluated: the caches only record the shapes
    model(mx.zeros((1, 2), mx.int32), layers)
    return check_device(
        list(list_known_answers(model, layers)),
        device=mx.default_device(),
        reference=mx.Device(mx.cpu),
    )


def _relative_error(found: mx.array, expected: mx.array) -> float:
    """Returns the error relative to the expected values; NaN if a value is not a number."""
    wide, known = found.astype(mx.float32), expected.astype(mx.float32)
    error = mx.sqrt(mx.mean(mx.square(wide - known)) / mx.mean(mx.square(known)))
    value = error.item()
    assert isinstance(value, float)
    return value


def _activation_type(model: nn.Module) -> mx.Dtype:
    """Returns the type of the model's norms, which is the type of its activations."""
    parameters: Any = tree_flatten(model.parameters())
    types = [array.dtype for name, array in parameters if name.endswith("norm.weight")]
    return next((dtype for dtype in types if dtype in _TOLERANCES), mx.float32)


def _weight_formats(model: nn.Module) -> set[WeightFormat]:
    formats: set[WeightFormat] = set()
    modules: Sequence[tuple[str, Any]] = model.named_modules()
    for _, module in modules:
        if "scales" in module and hasattr(module, "bits"):
            formats.add(
                WeightFormat(
                    mode=module.mode,
                    bits=module.bits or _DEFAULT_BITS[module.mode],
                    group_size=module.group_size or _DEFAULT_GROUPS[module.mode],
                )
            )
        elif isinstance(module, nn.Linear):
            formats.add(WeightFormat(mode=None))
    return formats


# MLX's defaults for a layer that does not store them
_DEFAULT_BITS = {"affine": 4, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4}
_DEFAULT_GROUPS = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}


def _draw(seed: int, *shape: int, dtype: mx.Dtype) -> mx.array:
    """Draws on the CPU, so that both devices get the same inputs."""
    with mx.stream(mx.Device(mx.cpu)):
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _make_product(form: WeightFormat, rows: int, dtype: mx.Dtype) -> KnownAnswer:
    """Returns a product with weights of a format. The known answer is a product with the same
    weights after `mx.dequantize`, which is much faster on a CPU than a quantized product."""
    name = f"product of {rows} rows with {form} weights"
    x, weight = _draw(1, rows, _WIDTH, dtype=dtype), _draw(2, _OUTPUTS, _WIDTH, dtype=dtype)
    if form.mode is None:
        return KnownAnswer(name=name, build=lambda: x @ weight.T)
    options: Any = {"group_size": form.group_size, "bits": form.bits, "mode": form.mode}
    with mx.stream(mx.Device(mx.cpu)):
        packed, scales, *rest = mx.quantize(weight, **options)
        biases = rest[0] if rest else None

    def build() -> mx.array:
        return mx.quantized_matmul(x, packed, scales=scales, biases=biases, **options)

    def reference() -> mx.array:
        wide = mx.dequantize(packed, scales, biases, **options).astype(mx.float32)
        return (x.astype(mx.float32) @ wide.T).astype(dtype)

    return KnownAnswer(name=name, build=build, reference=reference)


def _build_attention(shape: AttentionShape, length: int, dtype: mx.Dtype) -> mx.array:
    return scaled_dot_product_attention(
        _draw(3, 1, shape.heads, length, shape.key_dim, dtype=dtype),
        _draw(4, 1, shape.kv_heads, _POSITIONS, shape.key_dim, dtype=dtype),
        _draw(5, 1, shape.kv_heads, _POSITIONS, shape.value_dim, dtype=dtype),
        scale=shape.key_dim**-0.5,
        mask="causal" if length > 1 else None,
        softcap=50.0 if shape.softcap else None,
    )


def _build_rope(dtype: mx.Dtype) -> mx.array:
    x = _draw(6, 2, 4, 16, 64, dtype=dtype)
    return mx.fast.rope(
        x, 64, traditional=False, base=10000.0, scale=1.0, offset=mx.array([7, 1000])
    )
