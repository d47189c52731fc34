"""Mutates GGUF files with knowledge of their structure.

    python -m tests.models.gguf.fuzz 1000000
    python -m tests.models.gguf.fuzz --case 1234      # one file, with the traceback

Every mutation must give a valid model or a one-line error that names the file, and neither may take
much time or memory. The command mutates a model of each architecture, limits the address space of
the process and the time of each file, and prints the number of each outcome, the slowest file and
the peak memory. A file depends only on its number.
"""

import argparse
import json
import math
import random
import resource
import signal
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import tokenizers
from gguf.quants import QuantError

from app.core.errors import AppError
from app.core.model_files import ModelFiles
from app.engine.model_info import complete_config
from app.engine.weights import open_model, read_weights
from app.store.gguf.tokenizer import build_tokenizer, read_vocabulary
from models.gguf.architectures import read_config, rename_tensors
from models.gguf.ggml_types import GGML_TYPES, UNSUPPORTED_TYPES
from models.gguf.ollama_variant import read_model
from models.gguf.reader import GGUFError, GGUFFile
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

# the values of strings: architectures, tokenizers, and invalid values
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

# the CPU seconds that one file may take; the command also limits the bytes of the address space,
# and the seconds of the clock, which are many more on a busy machine
MAX_SECONDS, MAX_CLOCK_SECONDS, MAX_ADDRESS_SPACE = 2.0, 120, 8 << 30

# one of this many valid files is also opened, and its weights are read, which takes milliseconds
OPENED = 8

# the ways in which a tokenizer is stored
TOKENIZERS = ("gpt2", "llama", "gemma4", "bert", "t5")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The parts of a valid file, which are mutated on their own."""

    entries: Sequence[bytes]
    tensors: Sequence[bytes]
    data: bytes

    def write(self) -> bytes:
        return gguf(self.entries, self.tensors, self.data)


def make_sample(tokenizer: str = "gpt2", *, width: int = 32, type_id: int = 8) -> Sample:
    """A Llama of one layer, whose tokenizer has six tokens. width: of its hidden states. type_id:
    of its matrices."""
    integers = {
        "block_count": 1,
        "context_length": 32,
        "embedding_length": width,
        "feed_forward_length": width,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    entries = [text_entry("general.architecture", "llama")]
    entries += [int_entry(f"llama.{key}", value) for key, value in integers.items()]
    entries += [
        entry("llama.rope.freq_base", 6, struct.pack("<f", 10000.0)),
        int_entry("general.alignment", 32),
        *make_tokenizer(tokenizer),
    ]
    rows = {
        "token_embd": 6,
        "blk.0.attn_q": width,
        "blk.0.attn_k": width // 2,
        "blk.0.attn_v": width // 2,
        "blk.0.attn_output": width,
        "blk.0.ffn_gate": width,
        "blk.0.ffn_up": width,
        "blk.0.ffn_down": width,
    }
    shapes = {name: (width, count) for name, count in rows.items()}
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    tensors: list[bytes] = []
    size = 0
    for name, shape in [*shapes.items(), *((norm, (width,)) for norm in norms)]:
        kind = GGML_TYPES[type_id if len(shape) == 2 else 0]
        tensors.append(tensor(f"{name}.weight", shape, kind.id, size))
        nbytes = math.prod(shape) // kind.elements * kind.nbytes
        size += -(-nbytes // 32) * 32
    return Sample(entries=entries, tensors=tensors, data=bytes(size))


def make_tokenizer(model: str) -> list[bytes]:
    words = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
    return [
        text_entry("tokenizer.ggml.model", model),
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


def split_parts(content: bytes) -> Sample:
    """Splits a valid file into its parts."""
    file = _Cursor(content)
    file.take(8)
    num_tensors, num_keys = file.read_integer(8), file.read_integer(8)
    entries = [file.take_from(_skip_entry) for _ in range(num_keys)]
    tensors = [file.take_from(_skip_tensor) for _ in range(num_tensors)]
    data = content[-(-file.offset // 32) * 32 :]
    sample = Sample(entries=entries, tensors=tensors, data=data)
    assert sample.write() == content
    return sample


class _Cursor:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.offset = 0

    def take(self, size: int) -> bytes:
        self.offset += size
        return self._content[self.offset - size : self.offset]

    def read_integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def take_from(self, skip: Any) -> bytes:
        start = self.offset
        skip(self)
        return self._content[start : self.offset]


def _skip_entry(file: _Cursor) -> None:
    file.take(file.read_integer(8))
    _skip_value(file, file.read_integer(4))


def _skip_value(file: _Cursor, kind: int) -> None:
    if kind == ARRAY:
        element, count = file.read_integer(4), file.read_integer(8)
        for _ in range(count):
            _skip_value(file, element)
    elif kind == STRING:
        file.take(file.read_integer(8))
    else:
        file.take((1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)[kind])


def _skip_tensor(file: _Cursor) -> None:
    file.take(file.read_integer(8))
    file.take(8 * file.read_integer(4) + 12)


def make_samples(folder: Path) -> list[Sample]:
    """A model of each case of each architecture, half of them with quantized matrices, and each
    with one of the tokenizers. folder: for temporary files."""
    # imported here: the import builds all of them
    from tests.models.gguf.test_architectures import CASES, quantized, write_model

    samples = [make_sample(tokenizer) for tokenizer in TOKENIZERS]
    for number, case in enumerate(CASES):
        try:
            path, _ = write_model(case, folder, **({"quantize": quantized} if number % 2 else {}))
        except QuantError:  # its rows are no multiples of a block
            path, _ = write_model(case, folder)
        found = split_parts(path.read_bytes())
        tokenizer = make_tokenizer(TOKENIZERS[number % len(TOKENIZERS)])
        entries = [*found.entries, *tokenizer]
        sample = Sample(entries=entries, tensors=found.tensors, data=found.data)
        path.write_bytes(sample.write())
        if check(path, opens=True) == "read":  # some heads are narrower than a block
            samples.append(sample)
    assert len(samples) > len(CASES)
    return samples


def split_shards(sample: Sample, rng: random.Random) -> list[Sample]:
    """The same model in two files. Both have all of the data, but half of the tensors each."""
    cut = rng.randrange(len(sample.tensors) + 1)
    return [
        Sample(
            entries=[
                int_entry("split.no", number),
                int_entry("split.count", 2),
                int_entry("split.tensors.count", len(sample.tensors)),
                *(() if number else sample.entries),
            ],
            tensors=tensors,
            data=sample.data,
        )
        for number, tensors in enumerate((sample.tensors[:cut], sample.tensors[cut:]))
    ]


def mutate(sample: Sample, rng: random.Random) -> bytes:
    """Returns a file with one to three mutations."""
    entries, tensors = list(sample.entries), list(sample.tensors)
    counts: dict[str, int] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.75:  # keeps the structure, so that the values are interpreted
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
                versions = (0, 1, 2, 3, 4, 3 << 24, rng.getrandbits(32))
                counts[rng.choice(("version", "alignment"))] = rng.choice(versions)
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
        alignment=counts.get("alignment", 0) % 64 or 32,
        num_tensors=counts.get("num_tensors"),
        num_keys=counts.get("num_keys"),
    )
    if rng.random() < 0.1:
        content = content[: rng.randrange(len(content))]
    return content


def _replace_part(entries: list[bytes], tensors: list[bytes], rng: random.Random) -> None:
    """Replaces an entry or a tensor with a well-formed one that has a different value."""
    if rng.random() < 0.6 and entries:
        index = rng.randrange(len(entries))
        name = _read_name(entries[index])
        value = rng.choice((*EXTREMES, *range(17)))
        if rng.random() < 0.4:  # a number in the place of another one
            entries[index] = entry(name, 4, struct.pack("<I", value & 0xFFFFFFFF))
            return
        entries[index] = rng.choice(
            (
                _rename(rng.choice(entries), name),
                entry(name, 10, struct.pack("<Q", value)),
                entry(name, 5, struct.pack("<i", rng.choice((-1, -(1 << 31), 5)))),
                entry(name, 6, struct.pack("<f", rng.choice((0.0, -1.0, float("nan"), 1e38)))),
                entry(name, 7, bytes([rng.randrange(3)])),
                entry(name, STRING, string(rng.choice(_TEXTS))),
                entry(name, ARRAY, array(5, [struct.pack("<i", -1)] * rng.randrange(9))),
                entry(name, ARRAY, array(4, [struct.pack("<I", value & 0xFFFFFFFF)] * 70)),
                entry(name, ARRAY, array(STRING, [string(b"a b")] * rng.randrange(9))),
                entry(name, ARRAY, array(STRING, [string(rng.randbytes(3))] * rng.randrange(9))),
                entry(name, ARRAY, array(ARRAY, [array(4, [])] * rng.randrange(3))),
                entry(name, ARRAY, array(ARRAY, [array(ARRAY, [array(4, [])])])),
                entry(name, ARRAY, array(rng.choice((4, 7, STRING)), [], count=value)),
                entry(name, 12, struct.pack("<d", rng.choice((0.5, 1e300, float("inf"))))),
            )
        )
    elif tensors:
        index = rng.randrange(len(tensors))
        name, old = _read_name(tensors[index]), tensors[index]
        kind = rng.choice((*GGML_TYPES, *UNSUPPORTED_TYPES, 99))
        if rng.random() < 0.2:  # the place of another tensor
            tensors[index] = _rename(rng.choice(tensors), name)
            return
        if rng.random() < 0.3:  # only another type
            tensors[index] = old[:-12] + struct.pack("<I", kind) + old[-8:]
            return
        dims = [rng.choice((1, 6, 16, 32, 256, 1 << 40)) for _ in range(rng.randint(1, 5))]
        offset = rng.choice((0, 32, 64, 1024, 1 << 40))
        tensors[index] = tensor(name, dims, kind, offset)


def _read_name(part: bytes) -> bytes:
    length = int.from_bytes(part[:8], "little")
    return part[8 : 8 + length]


def _rename(part: bytes, name: bytes) -> bytes:
    return string(name) + part[8 + len(_read_name(part)) :]


def _replace_integer(part: bytes, rng: random.Random) -> bytes:
    size = rng.choice((4, 8))
    if len(part) < size:
        return part
    start = rng.randrange(0, len(part) - size + 1)
    value = rng.choice(EXTREMES) & ((1 << 8 * size) - 1)
    return part[:start] + value.to_bytes(size, "little") + part[start + size :]


def check(path: Path, *, opens: bool = False) -> str:
    """Returns the outcome: "valid", or the kind of the error. opens: whether the weights of a valid
    file are also read. Raises AssertionError for an error that is not one line or does not name the
    file, and any other exception."""
    try:
        file = read_model(path)
        config = read_config(file)
        rename_tensors(file)
        built = json.dumps(build_tokenizer(read_vocabulary(file)))
        if opens:
            _read_weights(file, config)
    except (AppError, GGUFError) as error:
        message = str(error)
        assert "\n" not in message, message
        assert str(path.parent) in message, message
        assert len(message) < 1000 + len(str(path)), message
        return type(error).__name__
    try:
        tokenizers.Tokenizer.from_str(built)
    except Exception as error:  # the library's; the server loads tokenizers in another process
        return f"tokenizer: {type(error).__name__}"
    return "read" if opens else "valid"


def _read_weights(file: GGUFFile, config: dict[str, Any]) -> None:
    files = ModelFiles(
        name="mutated",
        path=file.path,
        config=config,
        shards=file.paths,
        tokenizer_path=file.path,
        tokenizer_config={},
        generation_config={},
        chat_template=None,
        created=0,
    )
    mx.random.seed(0)  # else MLX keeps the unevaluated keys of all initial weights
    model = open_model(complete_config(files), None)
    read_weights(model, file.path, lambda percent, memory: None)


class Fuzzer:
    """Writes mutated files to a folder, and checks them."""

    def __init__(self, samples: Sequence[Sample], folder: Path) -> None:
        self._samples = samples
        self._whole = folder / "mutated.gguf"
        self._shards = [folder / f"split-0000{number}-of-00002.gguf" for number in (1, 2)]
        for sample in samples:
            self._whole.write_bytes(sample.write())
            assert check(self._whole, opens=True) == "read"

    def check(self, number: int) -> str:
        """Checks the file with a number. Returns the outcome."""
        rng = random.Random(number)
        sample = rng.choice(self._samples)
        if rng.random() < 0.9:
            path = self._whole
            path.write_bytes(mutate(sample, rng))
        else:
            path = rng.choice(self._shards)
            for shard, part in zip(self._shards, split_shards(sample, rng), strict=True):
                shard.write_bytes(mutate(part, rng) if rng.random() < 0.5 else part.write())
            if rng.random() < 0.1:
                rng.choice(self._shards).unlink()
        return check(path, opens=rng.randrange(OPENED) == 0)


def fuzz(numbers: range, samples: Sequence[Sample], folder: Path) -> Counter[str]:
    """Checks the files with these numbers, and returns the number of each outcome."""
    fuzzer, outcomes = Fuzzer(samples, folder), Counter[str]()
    for number in numbers:
        started = time.process_time()
        try:
            outcomes[fuzzer.check(number)] += 1
        except BaseException as error:
            error.add_note(f"case {number}")
            raise
        assert time.process_time() - started < MAX_SECONDS, f"case {number}"
    return outcomes


def _limit_process() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))

    def expire(*_: object) -> None:
        raise AssertionError(f"more than {MAX_SECONDS} s of CPU time, or {MAX_CLOCK_SECONDS} s")

    signal.signal(signal.SIGALRM, expire)
    signal.signal(signal.SIGPROF, expire)


def _limit_seconds(cpu: float, clock: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check mutated GGUF files.")
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first file")
    parser.add_argument("--case", type=int, help="check only the file with this number")
    arguments = parser.parse_args()
    first, count = arguments.first, arguments.count
    if arguments.case is not None:
        first, count = arguments.case, 1
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as made:
        samples = make_samples(Path(made))
        _limit_process()
        fuzzer, outcomes, failures = Fuzzer(samples, Path(made)), Counter[str](), list[int]()
        slowest = 0.0, first
        for number in range(first, first + count):
            started = time.process_time()
            try:
                _limit_seconds(MAX_SECONDS, MAX_CLOCK_SECONDS)
                outcomes[fuzzer.check(number)] += 1
                _limit_seconds(0, 0)
            except Exception as error:
                _limit_seconds(0, 0)
                if arguments.case is not None:
                    raise
                failures.append(number)
                print(f"case {number}: {type(error).__name__}: {error}"[:400], flush=True)
            slowest = max(slowest, (time.process_time() - started, number))
            if number % 10_000 == 0:
                print(f"{number} files, {len(failures)} failures", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{len(samples)} models, peak memory {peak}, {len(failures)} failures")
    print(f"slowest: case {slowest[1]}, {slowest[0]:.3f} s of CPU time")
    for outcome, number in outcomes.most_common():
        print(f"{number:9d}  {outcome}")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
