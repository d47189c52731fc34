# The operations of the extension (src/module.cpp). All run on the CPU, are lazy like MLX's, compute
# in float32, and are batch-invariant: the result for a row depends bitwise on that row only, not on
# the other rows or on the number of threads.

import mlx.core as mx

# the version of MLX whose headers it was compiled with
built_for: str

def isa() -> str:
    """The instruction set in use, selected once: the best, or the one that MLXRUNNER_ISA names.
    Raises RuntimeError, as all operations do, if this machine does not support that one."""

def threads() -> int: ...
def use_threads(count: int) -> None:
    """Use this many threads, at most 256; must not be called while anything is evaluated. Raises
    ValueError for other numbers."""

def keep_memory() -> None:
    """From now on keep up to 128 MiB of freed memory in the process for later arrays."""

def return_memory() -> None:
    """Return free memory to the system."""

class Product:
    """A product with a matrix [out, in]: float32, bfloat16 or float16, or in MLX's affine packing
    of 4 or 8 bits, groups of 32, 64 or 128; weight, scales and biases in the layout of `strips`.
    bias: [out] float32. Raises ValueError for other shapes and types."""

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        bias: mx.array | None = None,
        *,
        group_size: int = 0,
        bits: int = 0,
    ) -> None: ...
    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] -> [..., out], in x's type."""

    def choose(self, x: mx.array, chosen: mx.array) -> mx.array:
        """For a stack [E, out, in]: x [..., 1, in] times the matrices with the indices chosen [...,
        k], leading axes that broadcast -> [..., k, 1, out]."""

    def alike(self, other: Product) -> bool:
        """Whether both have the same shape and format."""

    def rows(self, ids: mx.array) -> mx.array:
        """[...] row indices -> [..., in] float32."""

def strips(a: mx.array, bits: int = 0, *, back: bool = False) -> mx.array:
    """Packs a matrix, scales or biases, or with bits 4 or 8 packed words, [..., out, n], into
    panels of sixteen interleaved rows, in the same shape; back: unpacks them. Works in place if
    there is no other reference to the array."""

def gated(activation: str, gate: Product, up: Product, x: mx.array) -> mx.array:
    """activation(gate(x)) * up(x). activation: see `gate`."""

def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """float32 [..., D] with any strides -> contiguous. weight: [D] float32."""

def rope(
    x: mx.array,
    offset: int | mx.array,
    periods: mx.array,
    dims: int,
    *,
    traditional: bool = False,
    magnitude: float = 1.0,
) -> mx.array:
    """float32 [B, H, L, D] with any strides -> contiguous; see `Rope` in models/rope.py. Angles
    must be below 2^20."""

def gate(kind: str, gate: mx.array, up: mx.array) -> mx.array:
    """activation(gate) * up. kind: silu, gelu (with erf), gelu_tanh, relu."""

def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
    slots: list[int],
    lengths: list[int],
    heads: list[int],
    firsts: list[int],
    *,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
    softcap: float = 0.0,
) -> tuple[mx.array, list[mx.array], list[mx.array]]:
    """Write new positions to the buffers and attend to them (src/attention_ops.hpp). A buffer
    without other references is written in place, so drop references to the old ones."""

def attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    causal: bool = False,
    window: int = 0,
    sinks: mx.array | None = None,
    softcap: float = 0.0,
) -> mx.array:
    """Attention to given keys and values. causal: aligns the last query with the last key."""

class AttentionBlock:
    """x + o(attention(...)) for one new position of each sequence: bitwise equal to
    `attention_residual` of models/prenorm.py with the attention of models/attention.py. A norm is
    (weight, epsilon); q_norm and k_norm apply to each head; without periods nothing is rotated. For
    a few rows only: all intermediate results are in memory at once. Raises ValueError for parts
    with inconsistent shapes."""

    def __init__(
        self,
        norm: tuple[mx.array, float],
        q: Product,
        k: Product,
        v: Product,
        o: Product,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        q_norm: tuple[mx.array, float] | None = None,
        k_norm: tuple[mx.array, float] | None = None,
        periods: mx.array | None = None,
        dims: int = 0,
        traditional: bool = False,
        magnitude: float = 1.0,
        sinks: mx.array | None = None,
    ) -> None: ...
    def __call__(
        self,
        x: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        slots: list[int],
        lengths: list[int],
        heads: list[int],
        firsts: list[int],
        window: int,
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """x [B, 1, hidden]; the other parameters and the result as for `attend`. The slot mapping
        gives the position for the rotation."""

class MlpBlock:
    """x + down(activation(gate(h)) * up(h)), h = rms_norm(x): bitwise equal to `mlp_residual` of
    models/prenorm.py with the GatedMLP of models/layers.py. For a few rows only."""

    def __init__(
        self,
        norm: tuple[mx.array, float],
        activation: str,
        gate: Product,
        up: Product,
        down: Product,
    ) -> None: ...
    def __call__(self, x: mx.array) -> mx.array: ...
