# The operations of the extension (src/module.cpp). All of them run on the CPU, are lazy like MLX's
# operations, compute in float32, and are batch-invariant. The result for a row depends bit for bit
# only on that row, and not on the other rows or the number of threads.

import mlx.core as mx

# the MLX version whose headers the extension was compiled with
built_for: str

# the version of these operations
interface: int

def isa() -> str:
    """Returns the instruction set in use, which is selected only once. It is the best supported
    one, or the one in MLXRUNNER_ISA. Like all operations, this function raises RuntimeError if this
    machine does not support the one in MLXRUNNER_ISA."""

def why_no_tiles() -> str:
    """Returns the reason why products with 4- and 8-bit matrices do not use tiles (Intel AMX), or
    "" if they do."""

def why_no_bf16_tiles() -> str:
    """Returns the reason why products with bfloat16 matrices do not use tiles, or "" if they do. On
    tiles, their bits differ from those of other instruction sets."""

def num_threads() -> int: ...
def set_num_threads(count: int) -> None:
    """Sets the number of threads, at most 256. It must not be called while anything is evaluated.
    Raises ValueError for other numbers."""

def max_rows_per_task(keys: int) -> int:
    """Returns the most queries, counted once per head of a group, whose scores of `keys` keys a
    thread stores at the same time. A single query may have more heads."""

def retain_freed_memory() -> None:
    """Keeps up to 128 MiB of freed memory in the process for later arrays, from now on."""

def trim_memory() -> None:
    """Returns free memory to the system."""

class Matmul:
    """Computes x @ W^T + bias with a matrix W [out, in]. The matrix is float32, bfloat16 or
    float16, or in MLX's affine packing of 4 or 8 bits, in groups of 32, 64 or 128. weight, scales
    and biases have the layout of `repack` and `repack_scales`. bias: [out] float32. activations:
    the number of bits to which products with a packed matrix round x, 8, 16 or 24. On tiles,
    products with a bfloat16 matrix round x to 16 bits unless it is 24. Raises ValueError for other
    shapes, types and numbers."""

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        bias: mx.array | None = None,
        *,
        group_size: int = 0,
        bits: int = 0,
        activations: int = 24,
    ) -> None: ...
    @staticmethod
    def from_blocks(
        panels: mx.array,
        *,
        type_id: int,
        outputs: int,
        inputs: int,
        bias: mx.array | None = None,
        activations: int = 24,
    ) -> Matmul:
        """Returns the operation for a matrix, or a stack of matrices, with a block type of GGUF.
        panels: the result of `repack_blocks` for matrices of [outputs, inputs]. Raises ValueError
        for another shape."""

    def __call__(self, x: mx.array) -> mx.array:
        """Maps [..., in] to [..., out], in the type of x."""

    def multiply_by_reference(self, x: mx.array) -> mx.array:
        """Computes the same product as float32 by its definition, in plain C++, for tests; with a
        bfloat16 matrix, the product on tiles. Raises ValueError for a stack, a bias, and a matrix
        in another format."""

    def gather(self, x: mx.array, indices: mx.array) -> mx.array:
        """Multiplies x [..., 1, in] by the matrices `indices` [..., k] of a stack [E, out, in].
        Leading axes are broadcast. Returns [..., k, 1, out]."""

    def has_same_format(self, other: Matmul) -> bool:
        """Returns whether both matrices have the same shape and format."""

    def dequantize_rows(self, ids: mx.array) -> mx.array:
        """Returns rows [..., in] as float32. ids: the row indices, [...]."""

class SampleRow:
    """The settings of one sequence for `sample`, which never change.

    temperature: 0 for the most likely token. top_k: 0 if off. top_p: infinity if off. min_p: the
    logarithm of the parameter, -infinity if off. seed_words: two start words and two odd strides of
    the noise. num_drawn: the number of tokens drawn before this object was created. known: the
    tokens at the start of the sequence, which penalties count; the output begins at index
    output_begin. bias: pairs of a token and a number to add. penalty_window: the number of last
    tokens that penalties count; -1: all. bad_words: sequences that the output must not contain.
    stop_tokens: tokens that may not be among the first min_tokens ones. Raises ValueError for a
    token that is not in the vocabulary."""

    def __init__(
        self,
        *,
        vocab: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed_words: tuple[int, int, int, int],
        num_drawn: int,
        known: list[int],
        output_begin: int,
        bias: list[tuple[int, float]],
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        penalty_window: int,
        allowed_tokens: list[int] | None,
        bad_words: list[list[int]],
        stop_tokens: list[int],
        min_tokens: int,
    ) -> None: ...
    @property
    def uses_history(self) -> bool:
        """Whether the result depends on the tokens of the sequence."""

def sample(
    logits: mx.array,
    rows: list[SampleRow],
    num_earlier: list[int],
    step: int,
    earlier: mx.array | None = None,
    recent: mx.array | None = None,
    bitmask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Samples one token per row. Returns the tokens [rows] uint32, and whether they are valid
    [rows] bool. app/engine/sampling defines the stages, the filters and the noise.

    logits: [rows, V] float32 with any strides. num_earlier: the number of tokens that each row has
    drawn before this batch. step: the number of tokens that each row has drawn in this batch.
    earlier, recent: these tokens of the rows that use their history, one row after the other, and
    of all rows, [step or more, rows] uint32. bitmask: [rows, V / 32 or more] uint32, the tokens
    that may be drawn. Raises ValueError for other shapes and types."""

def logprobs(logits: mx.array, tokens: mx.array, count: int) -> tuple[mx.array, mx.array, mx.array]:
    """Returns the log probabilities [rows] of `tokens` [rows] uint32 under logits [rows, V] float32
    with any strides, and the `count` most likely tokens and their log probabilities, both [rows,
    count] and most likely first. All log probabilities of a row with NaN, with +infinity or without
    a finite logit are NaN. Raises ValueError for other shapes and types."""

def repack_blocks(raw: mx.array, type_id: int) -> mx.array:
    """Converts rows of blocks, uint8 [..., out, bytes per row] as in a GGUF file, to panels for
    `Matmul.from_blocks`, uint8 with the number of rows rounded up to a multiple of sixteen. No bit
    is lost. type_id: the number of the type in the file. Raises ValueError for other types and
    partial blocks."""

def repack(a: mx.array, bits: int = 0, *, undo: bool = False) -> mx.array:
    """Packs an array [..., out, n] into panels of sixteen interleaved rows, in the same shape. The
    array is a matrix, or packed words if bits is 4 or 8. undo: whether to unpack instead. The
    result begins at a cache line."""

def repack_scales(a: mx.array, *, undo: bool = False) -> mx.array:
    """Like `repack`, for the scales or the biases of a packed matrix."""

def gate_up(activation: str, gate: Matmul, up: Matmul, x: mx.array) -> mx.array:
    """Returns activation(gate(x)) * up(x). activation: see `glu`."""

def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Normalizes float32 rows [..., D] with any strides. The result is contiguous. weight: [D]
    float32."""

def rope(
    x: mx.array,
    offset: int | mx.array,
    periods: mx.array,
    dims: int,
    *,
    traditional: bool = False,
    magnitude: float = 1.0,
) -> mx.array:
    """Rotates float32 heads [B, H, L, D] with any strides; see `Rope` in models/rope.py. The result
    is contiguous. Angles must be below 2^20."""

def glu(activation: str, gate: mx.array, up: mx.array) -> mx.array:
    """Returns activation(gate) * up. activation: silu, gelu (with erf), gelu_tanh or relu."""

def softcap(x: mx.array, cap: float) -> mx.array:
    """Returns cap * tanh(x / cap) for float32 x [..., D] with any strides. The result is
    contiguous."""

def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
    slots: list[int],
    lengths: list[int],
    head_slots: list[int],
    first_positions: list[int],
    *,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
    softcap: float = 0.0,
) -> tuple[mx.array, list[mx.array], list[mx.array]]:
    """Writes new positions to the buffers and computes attention to all positions
    (src/attention_ops.hpp). A buffer without other references is written in place, so the caller
    should drop references to the old buffers."""

def attend_shared(
    q: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
    lengths: list[int],
    head_slots: list[int],
    first_positions: list[int],
    *,
    scale: float,
    window: int = 0,
) -> mx.array:
    """Computes attention from the queries of the last positions to all positions in the buffers,
    which are not written. The parameters are those of `attend`."""

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
    """Computes attention to given keys and values. causal: aligns the last query with the last
    key."""

class AttentionBlock:
    """Computes x + o(attention(...)) for one new position of each sequence. The result is
    bit-identical to `attention_residual` of models/prenorm.py with the attention of
    models/attention.py. A norm is a pair (weight, epsilon). q_norm, k_norm and v_norm apply to each
    head, and post_norm to the result of o. Without v, the values are the keys before their norm and
    rotation. Without k and v, only `attend_shared` may be called. Without periods, nothing is
    rotated. This operation is for a few rows only, because all
    intermediate results are in memory together. Raises ValueError for parts with inconsistent
    shapes."""

    def __init__(
        self,
        norm: tuple[mx.array, float],
        q: Matmul,
        k: Matmul | None,
        v: Matmul | None,
        o: Matmul,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        q_norm: tuple[mx.array, float] | None = None,
        k_norm: tuple[mx.array, float] | None = None,
        v_norm: tuple[mx.array, float] | None = None,
        post_norm: tuple[mx.array, float] | None = None,
        periods: mx.array | None = None,
        dims: int = 0,
        traditional: bool = False,
        magnitude: float = 1.0,
        sinks: mx.array | None = None,
    ) -> None: ...
    def __call__(
        self,
        x: mx.array,
        rope_deltas: list[int],
        keys: list[mx.array],
        values: list[mx.array],
        slots: list[int],
        lengths: list[int],
        head_slots: list[int],
        first_positions: list[int],
        window: int,
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """x: [B, 1, hidden]. rope_deltas: for each sequence, the position for the rotation minus
        the one in the slot mapping. The other parameters and the result are the same as for
        `attend`."""

    def attend_shared(
        self,
        x: mx.array,
        rope_deltas: list[int],
        keys: list[mx.array],
        values: list[mx.array],
        lengths: list[int],
        head_slots: list[int],
        first_positions: list[int],
        window: int,
    ) -> mx.array:
        """Uses the keys and values of another layer. x: [B, 1, hidden]. rope_deltas: see
        `__call__`. The other parameters are the same as for the function `attend_shared`."""

class MlpBlock:
    """Computes (x + post_norm(down(activation(gate(h)) * up(h)))) * scale with h = rms_norm(x). The
    result is bit-identical to `mlp_residual` of models/prenorm.py with the GatedMLP of
    models/layers.py. This operation is for a few rows only. scale: [1] float32."""

    def __init__(
        self,
        norm: tuple[mx.array, float],
        activation: str,
        gate: Matmul,
        up: Matmul,
        down: Matmul,
        *,
        post_norm: tuple[mx.array, float] | None = None,
        scale: mx.array | None = None,
    ) -> None: ...
    def __call__(self, x: mx.array) -> mx.array: ...

class DecoderLayers:
    """Computes consecutive decoder blocks for one new position of one sequence. The result is
    bit-identical to that of the separate operations. Raises ValueError if a block has no keys of
    its own, or if their hidden states differ in width."""

    def __init__(self, blocks: list[tuple[AttentionBlock, MlpBlock]]) -> None: ...
    def __call__(
        self,
        x: mx.array,
        rope_deltas: list[int],
        keys: list[mx.array],
        values: list[mx.array],
        slots: list[tuple[int, int, int, int, int]],
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """x: [1, 1, hidden]. The lists have one element per block. slots: the fields of
        `SlotMapping` in models/kernels/in_place_attention.py. The other parameters and the result
        are the same as for `AttentionBlock`."""

def mamba2(
    projected: mx.array,
    states: list[mx.array],
    tails: list[mx.array],
    *,
    conv_weight: mx.array,
    conv_bias: mx.array | None,
    dt_bias: mx.array,
    a_log: mx.array,
    d: mx.array,
    norm_weight: mx.array,
    eps: float,
    min_step: float,
    max_step: float,
) -> tuple[mx.array, list[mx.array], list[mx.array]]:
    """Computes a Mamba-2 layer between its projections (models/mamba2.py), one position after
    another. All arrays are float32. Returns the input of the output projection [B, L, H P], the
    states and the tails.

    projected: [B, L, H P + C + H], with channels C = H P + 2 G N. states: arrays [b, H, N, P],
    whose rows together are B. tails: [b, width - 1, C] of the same rows. conv_weight: [width, C], 2
    to 16 taps. conv_bias: [C]. dt_bias, a_log, d: [H]. norm_weight: [H P]. eps: of the norm.
    min_step, max_step: the limits of step sizes. States and tails are written in place if they have
    no other reference. Raises ValueError for inconsistent shapes."""

class InputGateBlock:
    """Computes (x + post_norm(projection(activation(gate(x)) * input))) * scale, like
    `input_residual` of models/gemma4.py. This operation is for a few rows only. scale: [1]
    float32."""

    def __init__(
        self,
        activation: str,
        gate: Matmul,
        projection: Matmul,
        post_norm: tuple[mx.array, float],
        *,
        scale: mx.array | None = None,
    ) -> None: ...
    def __call__(self, x: mx.array, input: mx.array) -> mx.array: ...

class Mamba2Block:
    """Computes x + out_proj(mamba2(in_proj(h), …)) with h = rms_norm(x). The result is
    bit-identical to `mamba_residual` of models/mamba2.py. This operation is for a few rows only.
    norm: its weight and epsilon. The other parameters are those of `mamba2`. Raises ValueError for
    inconsistent shapes."""

    def __init__(
        self,
        norm: tuple[mx.array, float],
        in_proj: Matmul,
        out_proj: Matmul,
        *,
        conv_weight: mx.array,
        conv_bias: mx.array | None,
        dt_bias: mx.array,
        a_log: mx.array,
        d: mx.array,
        norm_weight: mx.array,
        eps: float,
        min_step: float,
        max_step: float,
    ) -> None: ...
    def __call__(
        self, x: mx.array, states: list[mx.array], tails: list[mx.array]
    ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
        """x: [B, L, hidden]. states, tails: see `mamba2`."""
