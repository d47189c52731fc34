"""`make bench ARGS=batches`: one and eight streams of models other than Llama, ours and mlx-lm's.

Gemma 4, Nemotron-H, and classes of mlx-lm, dense and with experts, of random weights in bfloat16
and in 4 bits. Ours decode in the engine loop, mlx-lm's in its `BatchGenerator`, in this process and
in turns. The first table has tokens per CPU second, which can be compared while other processes
share the cores, the second one tokens per second. Both use the BLAS of the process.

On a CPU, mlx-lm multiplies stacked experts in float32 or packed, so only DBRX, which has single
experts, runs in bfloat16. It reads its routing in each layer, so its rows are computed one by one.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from app.engine.precision import choose_activation_bits, choose_kv_dtype
from models import architectures
from models.cpu_layout import apply_cpu_layout, get_activation_bits, set_activation_bits
from tests.engine import harness

STREAMS = 8
PROMPT = 8
ROUNDS = 5
# decode steps per measurement
STEPS = {"ours": 8, "mlx-lm": 1}
VOCAB = 8192

_BASE: Mapping[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
_GEMMA_ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "Gemma 4": {
        **{key: value for key, value in _BASE.items() if key != "rope_theta"},
        "model_type": "gemma4_text",
        "num_key_value_heads": 1,
        "global_head_dim": 128,
        "num_global_key_value_heads": None,
        "rope_parameters": _GEMMA_ROPES,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "final_logit_softcapping": 30.0,
        "attention_bias": False,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": VOCAB,
        "enable_moe_block": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "Nemotron-H": {
        **_BASE,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M*-M-",
        "num_hidden_layers": 9,
        "layer_norm_epsilon": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_proj_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 2,
        "conv_kernel": 4,
        "tie_word_embeddings": False,
    },
    "Seed-OSS": {**_BASE, "model_type": "seed_oss", "tie_word_embeddings": False},
    "OLMoE": {
        **_BASE,
        "model_type": "olmoe",
        "intermediate_size": 512,
        "num_key_value_heads": 8,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": False,
    },
    "DBRX": {
        "model_type": "dbrx",
        "d_model": 512,
        "n_heads": 8,
        "n_layers": 8,
        "max_seq_len": 4096,
        "vocab_size": VOCAB,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 16, "moe_top_k": 4},
    },
}
# the bits of the weights; None for bfloat16
BITS: Mapping[str, Sequence[int | None]] = {"OLMoE": (4,), "DBRX": (None,)}

# decodes some steps and returns the number of tokens
Decode = Callable[[], int]


def save(config: Mapping[str, Any], bits: int | None, folder: Path) -> None:
    """Saves a random model in mlx-lm's form."""
    from mlx_lm import utils

    given = json.loads(json.dumps(config))
    model_class, arguments = utils._get_classes(given)
    mx.random.seed(0)
    model: Any = model_class(arguments.from_dict(given))
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        model, given = utils.quantize_model(model, given, 64, bits)
    utils.save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(given))


def prepare_ours(folder: Path, rows: int) -> Decode:
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, mx.array] = {}
    for file in folder.glob("*.safetensors"):
        weights |= cast(dict[str, mx.array], mx.load(str(file)))
    model = architectures.build(config, weights)
    parameters: Any = [array for _, array in tree_flatten(cast(Any, model).parameters())]
    model.kv_dtype = choose_kv_dtype(parameters, "auto")
    apply_cpu_layout(cast(nn.Module, model))
    if get_activation_bits(model) is not None:
        set_activation_bits(model, choose_activation_bits(parameters, has_blocks=False))
    loop = harness.make_loop(
        model, running=rows, chunk=64, policy="radix", context=4096, vocab=VOCAB
    )
    for row in range(rows):
        fields: Any = {"max_tokens": 3000, "stop_token_ids": frozenset(), "top_logprobs": None}
        loop.submit(harness.job(str(row), _make_prompt(row), **fields))
    while sum(sequence.decoding for sequence in loop._scheduler.running) < rows:
        loop.step()

    def decode() -> int:
        for _ in range(STEPS["ours"]):
            loop.step()
        return rows * STEPS["ours"]

    return decode


def prepare_mlx_lm(folder: Path, rows: int) -> Decode:
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.utils import load_model

    model: Any = load_model(folder)[0]
    generator = BatchGenerator(model, max_tokens=3000)
    generator.insert([_make_prompt(row) for row in range(rows)])
    while len(generator.next_generated()) < rows:
        pass

    def decode() -> int:
        return sum(len(generator.next_generated()) for _ in range(STEPS["mlx-lm"]))

    return decode


def _make_prompt(row: int) -> list[int]:
    return [(7919 * row + 31 * place) % VOCAB for place in range(PROMPT)]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per CPU second and per second of some decode steps."""

    cpu: float
    wall: float


Found = Mapping[tuple[str, int], Sequence[Speeds]]


def measure(decoders: Mapping[tuple[str, int], Decode]) -> Found:
    """Measures in turns."""
    found: dict[tuple[str, int], list[Speeds]] = {key: [] for key in decoders}
    for decode in decoders.values():
        decode()
    for _ in range(ROUNDS):
        for key, decode in decoders.items():
            cpu, wall = time.process_time(), time.perf_counter()
            tokens = decode()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            found[key].append(Speeds(tokens / cpu, tokens / wall))
    return found


def report() -> str:
    rows: list[tuple[str, Found]] = []
    for name, config in MODELS.items():
        for bits in BITS.get(name, (None, 4)):
            with TemporaryDirectory() as place:
                folder = Path(place)
                save(config, bits, folder)
                decoders = {
                    (library, rows): prepare(folder, rows)
                    for library, prepare in (("ours", prepare_ours), ("mlx-lm", prepare_mlx_lm))
                    for rows in (1, STREAMS)
                }
                weights = "bfloat16" if bits is None else f"{bits} bits"
                rows.append((f"{name} | {weights}", measure(decoders)))
                print(_format_row(*rows[-1], "wall"), flush=True)
    tables: list[str] = []
    for title, clock in (("tokens per CPU second", "cpu"), ("tokens per second", "wall")):
        tables += ["", f"{title}:", "", *_HEAD, *(_format_row(*row, clock) for row in rows)]
    return "\n".join(tables[1:])


_HEAD = (
    "| model | weights | ours, 1 stream | ours, 8 streams | ratio | mlx-lm, 1 | mlx-lm, 8 "
    "| ours / mlx-lm, 1 | ours / mlx-lm, 8 |",
    "|---|---|---|---|---|---|---|---|---|",
)


def _format_row(name: str, found: Found, clock: str) -> str:
    speeds = {key: [getattr(one, clock) for one in all_] for key, all_ in found.items()}
    one, eight = speeds["ours", 1], speeds["ours", STREAMS]
    theirs = speeds["mlx-lm", 1], speeds["mlx-lm", STREAMS]
    cells = [
        name,
        f"{statistics.median(one):.0f}",
        f"{statistics.median(eight):.0f}",
        f"{_compare(eight, one):.1f}",
        *(f"{statistics.median(each):.1f}" for each in theirs),
        f"{_compare(one, theirs[0]):.1f}",
        f"{_compare(eight, theirs[1]):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _compare(speeds: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(speeds, others, strict=True))
