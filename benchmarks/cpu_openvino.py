"""The worker of the OpenVINO backend: a bare loop over a model that is built from its operations.

    PYTHON -m benchmarks.cpu_openvino FOLDER SIZE FORMAT THREADS

It needs a Python with openvino and numpy, and does not use MLX. The graph has the patterns of the
models that optimum-intel exports, because OpenVINO's CPU plugin fuses those: compressed weights
with their zero points and scales, RMS norm, RoPE, and attention with its caches as state. All other
settings are OpenVINO's defaults, so it quantizes activations and caches to 8 bits where it does so
by default. Decoding is greedy, as in the other backends.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]  # of another environment
from openvino import opset15 as op  # pyright: ignore[reportMissingImports]

from benchmarks.cpu_backends import serve_measurements
from benchmarks.cpu_cells import FORMATS, SHAPES, get_group_size
from benchmarks.cpu_weights import StoredWeights

STEPS = 16
EPSILON, ROPE_BASE = 1e-6, 10000.0
# an ordinary token, after the bytes
FIRST = 1000


def _constant(value: Any, dtype: Any = np.float32) -> Any:
    return op.constant(np.asarray(value, dtype))


def _ints(*values: int) -> Any:
    return _constant(values, np.int64)


class GraphBuilder:
    """Builds the stateful model of a shape. The inputs are input_ids [B, S], position_ids [B, S],
    mask [B, 1, S, positions] and beam_idx [B]; the output is logits [B, 1, vocabulary] of the last
    position."""

    def __init__(self, weights: StoredWeights) -> None:
        self._weights = weights
        self._shape = weights.shape
        self._sinks: list[Any] = []
        self._variables: list[Any] = []
        # kept for their bytes, which constants share
        self._tensors: list[Any] = []

    def build(self) -> Any:
        ids = op.parameter([-1, -1], np.int64, name="input_ids")
        positions = op.parameter([-1, -1], np.int64, name="position_ids")
        mask = op.parameter([-1, 1, -1, -1], np.float32, name="mask")
        self._beam = op.parameter([-1], np.int32, name="beam_idx")
        inputs = [ids, positions, mask, self._beam]
        for node in inputs:
            node.output(0).set_names({node.get_friendly_name()})
        embedding = self._weights.read("model.embed_tokens.weight")
        table = op.convert(_constant(embedding, np.float16), "f32")
        hidden = op.gather(table, op.convert(ids, "i32"), _constant(0, np.int32))
        rope = self._make_rope(positions)
        for layer in range(self._shape.layers):
            hidden = self._add_layer(hidden, f"model.layers.{layer}", mask, rope)
        hidden = self._norm(hidden, "model.norm")
        last = op.slice(hidden, _ints(-1), _ints(2**62), _ints(1), _ints(1))
        logits = op.matmul(last, self._compress(embedding), False, True)
        logits.output(0).set_names({"logits"})
        results = [op.result(logits, name="logits")]
        return ov.Model(results, self._sinks, inputs, self._variables, "llama")

    def _add_layer(self, x: Any, path: str, mask: Any, rope: tuple[Any, Any]) -> Any:
        shape = self._shape
        normed = self._norm(x, f"{path}.input_layernorm")
        queries = self._heads(normed, f"{path}.self_attn.q", shape.heads)
        keys = self._heads(normed, f"{path}.self_attn.k", shape.kv_heads)
        values = self._heads(normed, f"{path}.self_attn.v", shape.kv_heads)
        queries, keys = self._rotate(queries, rope), self._rotate(keys, rope)
        keys = self._cache(keys, f"{path}.key")
        values = self._cache(values, f"{path}.value")
        repeats = shape.heads // shape.kv_heads
        attended = op.scaled_dot_product_attention(
            queries, self._repeat(keys, repeats), self._repeat(values, repeats), mask
        )
        merged = op.reshape(
            op.transpose(attended, _ints(0, 2, 1, 3)),
            _ints(0, 0, shape.heads * shape.head_dim),
            True,
        )
        x = op.add(x, self._linear(merged, f"{path}.self_attn.o_proj"))
        normed = self._norm(x, f"{path}.post_attention_layernorm")
        gate = op.swish(self._linear(normed, f"{path}.mlp.gate_proj"))
        up = self._linear(normed, f"{path}.mlp.up_proj")
        return op.add(x, self._linear(op.multiply(gate, up), f"{path}.mlp.down_proj"))

    def _heads(self, x: Any, path: str, count: int) -> Any:
        """[B, S, width] -> [B, heads, S, head_dim]"""
        split = op.reshape(
            self._linear(x, f"{path}_proj"), _ints(0, 0, count, self._shape.head_dim), True
        )
        if self._shape.kind == "qwen3" and path[-1] in "qk":
            split = self._norm(split, f"{path}_norm")
        return op.transpose(split, _ints(0, 2, 1, 3))

    def _norm(self, x: Any, path: str) -> Any:
        mean = op.reduce_mean(op.power(x, _constant(2.0)), _ints(-1), True)
        root = op.sqrt(op.add(mean, _constant(EPSILON)))
        normed = op.multiply(x, op.divide(_constant(1.0), root))
        return op.multiply(_constant(self._weights.read(f"{path}.weight")), normed)

    def _make_rope(self, positions: Any) -> tuple[Any, Any]:
        """Cosines and sines, [B, 1, S, head_dim]."""
        exponents = np.arange(0, self._shape.head_dim, 2, dtype=np.float32) / self._shape.head_dim
        frequencies = _constant((1.0 / ROPE_BASE**exponents)[None, :, None])
        batch = op.gather(op.shape_of(positions, "i64"), _ints(0), _constant(0, np.int64))
        sizes = op.concat([batch, _ints(len(exponents)), _ints(1)], 0)
        half = op.broadcast(frequencies, sizes)
        where = op.convert(op.unsqueeze(positions, _ints(1)), "f32")
        angles = op.transpose(op.matmul(half, where, False, False), _ints(0, 2, 1))
        angles = op.concat([angles, angles], -1)
        return op.unsqueeze(op.cos(angles), _ints(1)), op.unsqueeze(op.sin(angles), _ints(1))

    def _rotate(self, x: Any, rope: tuple[Any, Any]) -> Any:
        half = self._shape.head_dim // 2
        low = op.slice(x, _ints(0), _ints(half), _ints(1), _ints(3))
        high = op.slice(x, _ints(half), _ints(2**62), _ints(1), _ints(3))
        turned = op.concat([op.multiply(high, _constant([[[[-1.0]]]])), low], -1)
        cosines, sines = rope
        return op.add(op.multiply(x, cosines), op.multiply(turned, sines))

    def _cache(self, new: Any, name: str) -> Any:
        """Appends to a cache, which is a variable of the model."""
        shape = self._shape
        partial = ov.PartialShape([-1, shape.kv_heads, -1, shape.head_dim])
        info = ov.op.util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = partial, ov.Type.f32, name
        variable = ov.op.util.Variable(info)
        batch = op.gather(op.shape_of(self._beam, "i64"), _ints(0), _constant(0, np.int64))
        empty = op.broadcast(
            _constant(0.0),
            op.concat([batch, _ints(shape.kv_heads), _ints(0), _ints(shape.head_dim)], 0),
        )
        past = op.read_value(empty, variable)
        past = op.gather(past, self._beam, _constant(0, np.int32))
        joined = op.concat([past, new], 2)
        self._sinks.append(op.assign(joined, variable))
        self._variables.append(variable)
        return joined

    def _repeat(self, x: Any, repeats: int) -> Any:
        """Repeats the heads of keys or values for the queries that share them."""
        if repeats == 1:
            return x
        shape = self._shape
        sizes = op.shape_of(x, "i64")
        axis = _constant(0, np.int64)
        batch, length = op.gather(sizes, _ints(0), axis), op.gather(sizes, _ints(2), axis)
        target = [batch, _ints(shape.kv_heads), _ints(repeats), length, _ints(shape.head_dim)]
        wide = op.broadcast(op.unsqueeze(x, _ints(2)), op.concat(target, 0), "BIDIRECTIONAL")
        return op.reshape(wide, _ints(0, shape.heads, -1, shape.head_dim), True)

    def _linear(self, x: Any, path: str) -> Any:
        return op.matmul(x, self._compress(self._weights.read(f"{path}.weight")), False, True)

    def _compress(self, weight: np.ndarray) -> Any:
        """A matrix [out, in] in the format, and the operations that decompress it. 4-bit weights
        have our groups, 8-bit weights have one scale per row, as NNCF's default."""
        match self._weights.format.bits, self._weights.format.dtype:
            case None, "bfloat16":
                stored = (weight.view(np.uint32) >> 16).astype(np.uint16)
                return op.convert(self._share(stored, ov.Type.bf16, weight.shape), "f32")
            case None, _:
                return _constant(weight)
            case 4, _:
                group = get_group_size(self._shape, self._weights.format)
                grouped = weight.reshape(len(weight), -1, group)
                numbers, zero, scale = quantize(grouped, 15)
                packed = numbers[..., ::2] | (numbers[..., 1::2] << 4)
                # zero points have the type of the weights
                stored = self._share(packed, ov.Type.u4, grouped.shape)
                zeros = zero.reshape(-1)
                zeros = self._share(zeros[::2] | (zeros[1::2] << 4), ov.Type.u4, zero.shape)
                plain = op.reshape(
                    self._dequantize(stored, zeros, scale), _ints(*weight.shape), False
                )
                return op.convert(plain, "f32")
            case _:
                numbers, zero, scale = quantize(weight, 255)
                stored = self._share(numbers, ov.Type.u8, weight.shape)
                zeros = self._share(zero, ov.Type.u8, zero.shape)
                return op.convert(self._dequantize(stored, zeros, scale), "f32")

    def _dequantize(self, numbers: Any, zero: Any, scale: np.ndarray) -> Any:
        plain = op.subtract(op.convert(numbers, "f16"), op.convert(zero, "f16"))
        return op.multiply(plain, _constant(scale, np.float16))

    def _share(self, stored: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> Any:
        tensor = ov.Tensor(np.ascontiguousarray(stored), ov.Shape(shape), dtype)
        self._tensors.append(tensor)
        return ov.op.Constant(tensor)


def quantize(grouped: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[..., group] as whole numbers from 0 to `most`, their zero points and their scales [..., 1],
    such that a weight is (number - zero point) * scale."""
    low = np.minimum(grouped.min(axis=-1, keepdims=True), 0)
    high = np.maximum(grouped.max(axis=-1, keepdims=True), 0)
    scale = np.maximum((high - low) / most, 1e-8)
    zero = np.round(-low / scale)
    numbers = np.clip(np.round(grouped / scale) + zero, 0, most)
    return numbers.astype(np.uint8), zero.astype(np.uint8), scale.astype(np.float32)


class OpenVinoWorker:
    def __init__(self, weights: StoredWeights, threads: int, **properties: Any) -> None:
        self._shape = weights.shape
        precision = {"float32": "f32", "bfloat16": "bf16"}[weights.format.dtype]
        if weights.format.bits is None:
            properties["INFERENCE_PRECISION_HINT"] = precision
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": threads,
            **properties,
        }
        self._builder = GraphBuilder(weights)
        self.compiled = ov.Core().compile_model(self._builder.build(), "CPU", settings)
        self._request = self.compiled.create_infer_request()

    def infer(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """[B, S] ids at these positions, after the caches -> [B, vocabulary] logits."""
        streams, count = tokens.shape
        columns = position + np.arange(count)
        mask = np.where(columns[:, None] >= np.arange(position + count), 0.0, -np.inf)
        inputs = {
            "input_ids": tokens.astype(np.int64),
            "position_ids": np.broadcast_to(columns, tokens.shape).astype(np.int64),
            "mask": np.broadcast_to(mask, (streams, 1, *mask.shape)).astype(np.float32),
            "beam_idx": np.arange(streams, dtype=np.int32),
        }
        found = self._request.infer(inputs, share_inputs=True, share_outputs=True)
        return found["logits"][:, 0]

    def reset(self) -> None:
        self._request.reset_state()

    def measure(self, request: dict[str, Any]) -> tuple[float, int]:
        """Tokens per second, and the number of steps or tokens measured."""
        if request["streams"] == 0:
            return self._prefill(request["prompt"], request["budget"])
        return self._decode(request["streams"], request["cached"], request["budget"])

    def _prefill(self, length: int, budget: float) -> tuple[float, int]:
        found: list[float] = []
        begun = time.perf_counter()
        while not found or time.perf_counter() - begun < budget:
            self.reset()
            started = time.perf_counter()
            self.infer(FIRST + np.arange(length)[None], 0).argmax(axis=-1)
            found.append(time.perf_counter() - started)
        return length / statistics.median(found), length

    def _decode(self, streams: int, cached: int, budget: float) -> tuple[float, int]:
        """The first step is not timed, as in the other backends."""
        found: list[float] = []
        self._fill(streams, cached)
        begun, position = time.perf_counter(), cached
        while not found or time.perf_counter() - begun < budget:
            # long caches are not evaluated again for a few more positions
            if position > cached + cached // 8:
                self._fill(streams, cached)
                position = cached
            tokens = self.infer(np.full((streams, 1), FIRST), position).argmax(axis=-1)
            started = time.perf_counter()
            for i in range(1, STEPS + 1):
                tokens = self.infer(tokens[:, None], position + i).argmax(axis=-1)
            found.append((time.perf_counter() - started) / STEPS)
            position += STEPS + 1
        return streams / statistics.median(found), STEPS

    def _fill(self, streams: int, cached: int) -> None:
        """Sets the caches to noise, whose values do not change the time."""
        self.reset()
        sizes = streams, self._shape.kv_heads, cached, self._shape.head_dim
        noise = np.random.default_rng(0).standard_normal(sizes, dtype=np.float32)
        for state in self._request.query_state():
            state.state = ov.Tensor(noise)

    def describe(self) -> str:
        """The version, the precision of computation, and which patterns were not fused."""
        nodes = self.compiled.get_runtime_model().get_ops()
        kinds = [str(node.get_rt_info()["layerType"].astype(str)) for node in nodes]
        missing = [
            kind for kind in ("RMS", "RoPE", "ScaledDotProductAttention") if kind not in kinds
        ]
        # attention that is not fused with its caches leaves two concatenations per layer
        if kinds.count("Concatenation") > self._shape.layers:
            missing.append("caches")
        precision = self.compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        version = ov.__version__.partition("-")[0]
        note = f", not fused: {', '.join(missing)}" if missing else ""
        return f"OpenVINO {version}, computes in {precision}{note}"


def main(folder: str, size: str, form: str, threads: str) -> None:
    worker = OpenVinoWorker(StoredWeights(Path(folder), SHAPES[size], FORMATS[form]), int(threads))
    serve_measurements(worker.measure, worker.describe())


if __name__ == "__main__":
    main(*sys.argv[1:])
