"""Mutates GGUF files with knowledge of their structure.

    python -m tests.models.gguf.fuzz 1000000

Every mutation must give a valid model or an error of one line that names the file, and neither may
take long or much memory. The command prints the number of each outcome.
"""

import json
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from app.core.errors import AppError
from app.store.gguf.tokenizer import build_tokenizer, read_vocabulary
from models.gguf.architectures import read_config, rename_tensors
from models.gguf.ollama_variant import read_model
from models.gguf.reader import GGUFError
from tests.models.gguf.raw_file import (
    ARRAY,
    STRING,
    array,
    entry,
    gguf,
    int_entry,
    string,
    tensor,
    text_entry,
)

# values at the limits of the integers in the format
EXTREMES = (0, 1, 2, 3, 7, 31, 32, 63, 64, 65, 255, 256, 4096, 1 << 16, 1 << 20, (1 << 31) - 1)
EXTREMES += (1 << 31, (1 << 32) - 1, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)

# the values of strings: architectures and tokenizers, and invalid ones
_TEXTS = (
    b"",
    b"llama",
    b"gptoss",
    b"gemma3",
    b"glm4moelite",
    b"bert",
    b"t5",
    b"\xff\n",
    b"x" * 300,
)

# the most seconds and bytes of memory that one file may take
MAX_SECONDS, MAX_GROWTH = 2.0, 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The parts of a valid file, which are mutated on their own."""

    entries: Sequence[bytes]
    tensors: Sequence[bytes]
    data: bytes


def make_sample(tokenizer: str) -> Sample:
    """A Llama of one layer, whose tokenizer has six tokens. tokenizer: tokenizer.ggml.model."""
    words = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
    integers = {
        "block_count": 1,
        "context_length": 32,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    entries = [text_entry("general.architecture", "llama")]
    entries += [int_entry(f"llama.{key}", value) for key, value in integers.items()]
    entries += [
        entry("llama.rope.freq_base", 6, struct.pack("<f", 10000.0)),
        int_entry("general.alignment", 32),
        text_entry("tokenizer.ggml.model", tokenizer),
        text_entry("tokenizer.ggml.pre", "llama-bpe"),
        entry("tokenizer.ggml.tokens", ARRAY, array(STRING, [string(word) for word in words])),
        entry(
            "tokenizer.ggml.token_type",
            ARRAY,
            array(5, [struct.pack("<i", kind) for kind in (2, 3, 3, 1, 1, 1)]),
        ),
        entry("tokenizer.ggml.merges", ARRAY, array(STRING, [string("a b")])),
        entry("tokenizer.ggml.scores", ARRAY, array(6, [struct.pack("<f", -1.0)] * 6)),
        # a trie of one node without characters
        entry(
            "tokenizer.ggml.precompiled_charsmap", ARRAY, array(0, [*map(bytes, [[4]] + [[0]] * 8)])
        ),
        int_entry("tokenizer.ggml.unknown_token_id", 0),
        int_entry("tokenizer.ggml.bos_token_id", 1),
        int_entry("tokenizer.ggml.eos_token_id", 2),
        text_entry("tokenizer.chat_template", "{{ messages }}"),
    ]
    shapes = {
        "token_embd": (32, 6),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (32, 16),
        "blk.0.attn_v": (32, 16),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_up": (32, 32),
        "blk.0.ffn_down": (32, 32),
    }
    tensors: list[bytes] = []
    size = 0
    for name, shape in shapes.items():
        kind, nbytes = (0, 4 * shape[0]) if len(shape) == 1 else (8, 34 * shape[1])
        tensors.append(tensor(f"{name}.weight", shape, kind, size))
        size += -(-nbytes // 32) * 32
    return Sample(entries=entries, tensors=tensors, data=bytes(size))


def mutate(sample: Sample, rng: random.Random) -> bytes:
    """Returns a file with one to three mutations."""
    entries, tensors = list(sample.entries), list(sample.tensors)
    counts: dict[str, int] = {}
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.6:  # keeps the structure, so that the values are interpreted
            _replace_part(entries, tensors, rng)
            continue
        parts = rng.choice((entries, entries, tensors))
        index = rng.randrange(len(parts)) if parts else 0
        match rng.randrange(10):
            case 0 if parts:
                del parts[index]
            case 1 if parts:
                parts.insert(rng.randrange(len(parts)), parts[index])
            case 2:
                parts.insert(index, rng.choice((*sample.entries, *sample.tensors)))
            case 3:
                counts[rng.choice(("num_tensors", "num_keys"))] = rng.choice(EXTREMES)
            case 4 if parts:  # a length, a count, a type, a dimension or an offset
                parts[index] = _replace_integer(parts[index], rng)
            case 5 if parts and parts[index]:
                parts[index] = parts[index][: rng.randrange(len(parts[index]))]
            case 6 if all(parts) and len(parts) > 1:
                other = rng.randrange(len(parts))
                cut, start = rng.randrange(len(parts[index])), rng.randrange(len(parts[other]))
                parts[index] = parts[index][:cut] + parts[other][start:]
            case 7:
                counts["version"] = rng.choice((0, 1, 2, 3, 4, 3 << 24, rng.getrandbits(32)))
            case _ if parts and parts[index]:
                flipped = bytearray(parts[index])
                for _ in range(rng.randint(1, 4)):
                    flipped[rng.randrange(len(flipped))] = rng.getrandbits(8)
                parts[index] = bytes(flipped)
            case _:
                pass
    content = gguf(
        entries,
        tensors,
        sample.data,
        version=counts.get("version", 3),
        num_tensors=counts.get("num_tensors"),
        num_keys=counts.get("num_keys"),
    )
    if rng.random() < 0.1:
        content = content[: rng.randrange(len(content))]
    return content


def _replace_part(entries: list[bytes], tensors: list[bytes], rng: random.Random) -> None:
    """Replaces an entry or a tensor by a well-formed one with another value."""
    if rng.random() < 0.6 and entries:
        index = rng.randrange(len(entries))
        name = _read_name(entries[index])
        value = rng.choice(EXTREMES)
        entries[index] = rng.choice(
            (
                entry(name, 4, struct.pack("<I", value & 0xFFFFFFFF)),
                entry(name, 10, struct.pack("<Q", value)),
                entry(name, 5, struct.pack("<i", rng.choice((-1, -(1 << 31), 5)))),
                entry(name, 6, struct.pack("<f", rng.choice((0.0, -1.0, float("nan"), 1e38)))),
                entry(name, 7, bytes([rng.randrange(3)])),
                entry(name, STRING, string(rng.choice(_TEXTS))),
                entry(name, ARRAY, array(5, [struct.pack("<i", -1)] * rng.randrange(9))),
                entry(name, ARRAY, array(STRING, [string(b"a b")] * rng.randrange(9))),
                entry(name, ARRAY, array(STRING, [string(rng.randbytes(3))] * rng.randrange(9))),
                entry(name, ARRAY, array(ARRAY, [array(4, [])] * rng.randrange(3))),
            )
        )
    elif tensors:
        index = rng.randrange(len(tensors))
        dims = [rng.choice((1, 6, 16, 32, 256, 1 << 40)) for _ in range(rng.randint(1, 5))]
        offset = rng.choice((0, 32, 64, 1024, 1 << 40))
        name = _read_name(tensors[index])
        tensors[index] = tensor(name, dims, rng.choice((0, 1, 2, 8, 12, 14, 16, 39, 99)), offset)


def _read_name(part: bytes) -> bytes:
    length = int.from_bytes(part[:8], "little")
    return part[8 : 8 + length]


def _replace_integer(part: bytes, rng: random.Random) -> bytes:
    size = rng.choice((4, 8))
    if len(part) < size:
        return part
    start = rng.randrange(0, len(part) - size + 1)
    value = rng.choice(EXTREMES) & ((1 << 8 * size) - 1)
    return part[:start] + value.to_bytes(size, "little") + part[start + size :]


def check(path: Path) -> str:
    """Returns the outcome: "valid", or the kind of the error. Raises AssertionError for an error
    that is not one line or does not name the file, and any other exception."""
    try:
        file = read_model(path)
        read_config(file)
        rename_tensors(file)
        built = json.dumps(build_tokenizer(read_vocabulary(file)))
    except (AppError, GGUFError) as error:
        message = str(error)
        assert "\n" not in message, message
        assert str(path) in message, message
        assert len(message) < 1000 + len(str(path)), message
        return type(error).__name__
    try:
        tokenizers.Tokenizer.from_str(built)
    except Exception as error:  # the library's; the server loads tokenizers in another process
        return f"tokenizer: {type(error).__name__}"
    return "valid"


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    """Checks `count` mutated files, and returns the number of each outcome."""
    rng, outcomes = random.Random(seed), Counter[str]()
    path = folder / "mutated.gguf"
    samples = [make_sample(tokenizer) for tokenizer in ("gpt2", "llama", "bert", "t5")]
    for sample in samples:
        path.write_bytes(gguf(sample.entries, sample.tensors, sample.data))
        assert check(path) == "valid"
    memory = _peak_memory()
    for number in range(count):
        path.write_bytes(mutate(rng.choice(samples), rng))
        started = time.process_time()
        outcomes[check(path)] += 1
        assert time.process_time() - started < MAX_SECONDS, f"seed {seed}, file {number}"
        assert _peak_memory() - memory < MAX_GROWTH, f"seed {seed}, file {number}"
    return outcomes


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as made:
        for outcome, number in fuzz(int(sys.argv[1]), seed, Path(made)).most_common():
            print(f"{number:9d}  {outcome}")
