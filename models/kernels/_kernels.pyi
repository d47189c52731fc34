# What the extension offers (src/module.cpp). Everything runs on the CPU, is lazy like all of MLX,
# computes in float32, and is batch-invariant: what is computed for a row depends on nothing but
# that row, to the bit, whatever stands beside it and however many threads there are.

import mlx.core as mx

# the version of MLX whose headers it was compiled with
built_for: str

def isa() -> str:
    """The instruction set in use, chosen once: the best, or the one that MLXRUNNER_ISA names.
    Raises RuntimeError, as all work does, where this machine has none of that name."""

def threads() -> int: ...
def use_threads(count: int) -> None:
    """So many share a product from now on, at most 256; not while anything is evaluated. Raises
    ValueError for other numbers."""

def keep_memory() -> None:
    """Memory of arrays that are gone is kept for those to come: up to 128 MiB, from now on, for the
    process."""

def return_memory() -> None:
    """What is free goes back to the system."""

class Product:
    """A matrix [out, in] that x is multiplied with: float32, bfloat16 or float16, or in MLX's
    affine packing of 4 or 8 bits, groups of 32, 64 or 128; weight, scales and biases as `strips`
    leaves them. bias: [out] float32. Raises ValueError for other shapes and types."""

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
        """Of a stack [E, out, in]: x [..., 1, in] with the matrices chosen [..., k], axes in front
        that broadcast -> [..., k, 1, out]."""

    def alike(self, other: Product) -> bool:
        """Whether both have one shape and format."""

    def rows(self, ids: mx.array) -> mx.array:
        """[...] of row numbers -> [..., in] float32."""

def strips(a: mx.array, bits: int = 0, *, back: bool = False) -> mx.array:
    """A matrix, scales or biases, or with bits 4 or 8 packed words, [..., out, n] -> the same
    shape, each sixteen rows side by side; back: as they were. What nobody else holds is rearranged
    where it lies."""

def gated(activation: str, gate: Product, up: Product, x: mx.array) -> mx.array:
    """activation(gate(x)) * up(x). activation: as `gate` takes it."""

def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """float32 [..., D], however it lies -> packed. weight: [D] float32."""

def rope(
    x: mx.array,
    offset: int | mx.array,
    periods: mx.array,
    dims: int,
    *,
    traditional: bool = False,
    magnitude: float = 1.0,
) -> mx.array:
    """float32 [B, H, L, D], however it lies -> packed; as models/rope.py's Rope. Angles below
    2^20."""

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
    """Write new positions to buffers and attend to them: src/attending.hpp. A buffer that nobody
    else holds is written in place, so let go of the old ones."""

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
    """Of keys and values that are there; causal: the last query stands where the last key does."""

class AttentionBlock:
    """x + o(attention(...)) of one new position of each sequence: models/prenorm.py's `attended`
    with models/heads.py's attention, to the bit. A norm is its weight and its epsilon; q_norm and
    k_norm are each head's; without periods nothing is rotated. A few rows only: all that is made on
    the way is held at once. Raises ValueError for parts that do not fit each other."""

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
        """x [B, 1, hidden]; the rest as `attend` takes and returns it. A position is rotated by
        where its place says that it stands."""

class MlpBlock:
    """x + down(activation(gate(h)) * up(h)), h = rms_norm(x): models/prenorm.py's `fed` with
    models/layers.py's GatedMLP, to the bit. A few rows only."""

    def __init__(
        self,
        norm: tuple[mx.array, float],
        activation: str,
        gate: Product,
        up: Product,
        down: Product,
    ) -> None: ...
    def __call__(self, x: mx.array) -> mx.array: ...
