"""The types of tensors in GGUF files: names and sizes of their blocks.

Knows: ggml's type numbers (ggml-org/ggml, include/ggml.h). Must not know: the layout of a block,
files, MLX.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GGMLType:
    """The type of a tensor. id: its number in the file. Rows are sequences of blocks of `elements`
    values, which take `nbytes` bytes. A plain type has blocks of one value."""

    id: int
    name: str
    elements: int
    nbytes: int

    @property
    def is_plain(self) -> bool:
        return self.elements == 1


# the types whose values this package can compute, by number: name, elements and bytes of a block
GGML_TYPES: Mapping[int, GGMLType] = {
    number: GGMLType(id=number, name=name, elements=elements, nbytes=nbytes)
    for number, name, elements, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (20, "IQ4_NL", 32, 18),
        (23, "IQ4_XS", 256, 136),
        (30, "BF16", 1, 2),
        (39, "MXFP4", 32, 17),
    )
}

# other types, for error messages: codebooks, ternary numbers, integers, types of activations
UNSUPPORTED_TYPES: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
