"""Summarizes the tensors of a GGUF file: names, parameter counts and types.

Knows: the header of a file, the labels of its quantization. Must not know: architectures.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from app.core.models import TensorDetails
from app.store.gguf.errors import translate_gguf_errors
from models.gguf import reader
from models.gguf.reader import GGUFFile

# values of general.file_type and the labels that llama.cpp and Ollama show for them
_FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    21: "Q2_K_S",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
    38: "MXFP4",
}


# groups of tensors: the first one whose pattern matches the name
_GROUPS = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("norms", r"norm\."),
        ("embeddings", r"^(token|position|per_layer_token)_embd\."),
        ("output", r"^output\."),
        ("experts", r"\.ffn_\w+_exps\."),
        ("feed forward", r"\.ffn_"),
        ("attention", r"\.attn_"),
        ("recurrent", r"\.(ssm_|shortconv)"),
        ("others", ""),
    )
)


def list_tensors(path: Path) -> Iterator[TensorDetails]:
    """Yields the tensors. Raises AppError(MODEL_FILES)."""
    for tensor in _read(path).tensors.values():
        yield TensorDetails(name=tensor.name, dtype=tensor.type.name, shape=tensor.shape)


def count_parameters(path: Path) -> tuple[int, str]:
    """Returns the number of parameters and the name of their quantization: the label of the file
    or, without one, the type of most parameters. Raises AppError(MODEL_FILES)."""
    file = _read(path)
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += tensor.num_elements
    label = _FILE_TYPES.get(_get_file_type(file))
    return counts.total(), label or next((name for name, _ in counts.most_common(1)), "")


def count_types(path: Path) -> Mapping[str, Mapping[str, int]]:
    """Returns the number of parameters of each type, most common first, in each group of tensors.
    Raises AppError(MODEL_FILES)."""
    groups: dict[str, Counter[str]] = {name: Counter() for name, _ in _GROUPS}
    for tensor in _read(path).tensors.values():
        group = next(name for name, pattern in _GROUPS if pattern.search(tensor.name))
        groups[group][tensor.type.name] += tensor.num_elements
    return {name: dict(counts.most_common()) for name, counts in groups.items() if counts}


def _get_file_type(file: GGUFFile) -> int:
    value = file.metadata.get("general.file_type")
    return value if isinstance(value, int) else -1


def _read(path: Path) -> GGUFFile:
    with translate_gguf_errors():
        return reader.read(path)
