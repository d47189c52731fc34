"""The peers of `make bench-cpu`: their programs, and the files that they read."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import mlx.core as mx
import numpy as np
import pytest

from benchmarks import cpu_gguf, cpu_mlx, cpu_models
from benchmarks.cpu_backends import BackendError
from benchmarks.cpu_cells import FORMATS, Format, ModelShape, decode, prefill
from benchmarks.cpu_http import run_llama_server
from benchmarks.cpu_llama import (
    BatchedBench,
    LlamaPrograms,
    find_programs,
    make_options,
    make_server_command,
    parse_features,
    parse_rows,
)
from benchmarks.cpu_weights import StoredWeights
from models import architectures
from models.gguf import reader
from tests.server_process import ROOT

pytestmark = pytest.mark.exhaustive  # a tool of developers

LLAMA = ModelShape(
    kind="llama", width=64, layers=2, heads=2, kv_heads=2, head_dim=32, inner=128, vocab=400
)
QWEN = ModelShape(
    kind="qwen3", width=64, layers=2, heads=4, kv_heads=2, head_dim=32, inner=128, vocab=400
)

# recorded from llama.cpp 0c1e570
SYSTEM_INFO = (
    "system_info: n_threads = 2 (n_threads_batch = 2) / 2 | CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | "
    "AVX_VNNI = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | AVX512 = 1 | AVX512_VBMI = 1 | "
    "AVX512_VNNI = 1 | AVX512_BF16 = 1 | LLAMAFILE = 1 | OPENMP = 1 | REPACK = 1 | "
)
# recorded with `-npp 64,64,1 -ntg 16 -npl 4`
ROWS = """
{"n_kv_max": 1024, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": -1, "n_threads": 1, "n_threads_batch": 1, "pp": 64, "tg": 16, "pl": 4, "n_kv": 320, "t_pp": 0.053362, "speed_pp": 4797.421387, "t_tg": 0.068152, "speed_tg": 939.077332, "t": 0.121514, "speed": 2633.441162}
{"n_kv_max": 1024, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": -1, "n_threads": 1, "n_threads_batch": 1, "pp": 64, "tg": 16, "pl": 4, "n_kv": 320, "t_pp": 0.039242, "speed_pp": 6523.622559, "t_tg": 0.072133, "speed_tg": 887.250000, "t": 0.111375, "speed": 2873.176270}
{"n_kv_max": 1024, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": -1, "n_threads": 1, "n_threads_batch": 1, "pp": 1, "tg": 16, "pl": 4, "n_kv": 68, "t_pp": 0.001120, "speed_pp": 3571.428467, "t_tg": 0.018133, "speed_tg": 3529.479980, "t": 0.019253, "speed": 3531.917969}

"""  # noqa: E501
DECODE_RATE = (939.077332 + 887.25) / 2


def write_program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> LlamaPrograms:
    """Programs that print what was recorded."""
    folder = tmp_path / "bin"
    (tmp_path / "rows").write_text(ROWS)
    write_program(
        folder, "llama-batched-bench", f'echo "$@" >> {folder}/calls; cat {tmp_path}/rows'
    )
    write_program(folder, "llama-server", f"echo '{SYSTEM_INFO}'; echo 'no such model' >&2; exit 1")
    return LlamaPrograms(folder=folder, system_info=SYSTEM_INFO)


def test_features_are_those_of_the_cpu_backend():
    features = parse_features(SYSTEM_INFO)
    assert features["AVX512_VNNI"]
    assert "n_threads" not in features
    assert "AMX_INT8" not in features
    amx = LlamaPrograms(folder=Path(), system_info=f"{SYSTEM_INFO}AMX_INT8 = 1 | ")
    assert amx.description.startswith("tiles on (")
    off = LlamaPrograms(folder=Path(), system_info=f"{SYSTEM_INFO}AMX_INT8 = 0 | ")
    assert off.description.startswith("tiles off (")


def test_programs_are_found_in_the_folder_that_the_variable_names(monkeypatch, programs):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    assert find_programs() is None
    monkeypatch.setenv("LLAMA_CPP", str(programs.folder))
    found = find_programs()
    assert found is not None
    assert found.features == programs.features
    (programs.folder / "llama-server").write_text("#!/bin/sh\necho unknown option\n")
    with pytest.raises(ValueError, match="does not print its features:\nunknown option"):
        find_programs()
    (programs.folder / "llama-batched-bench").unlink()
    with pytest.raises(ValueError, match=r"LLAMA_CPP: .* has no llama-batched-bench"):
        find_programs()


def test_rows_of_the_last_prompt_do_not_count():
    assert [row["speed_tg"] for row in parse_rows(ROWS, 64)] == [939.077332, 887.25]
    assert parse_rows("\n\n", 64) == []


def test_options_have_a_context_for_all_streams():
    options = make_options(decode(4), 2)
    assert " ".join(options).startswith("-npp 64,64,1 -ntg 16 -npl 4 -c 1024 ")
    options = make_options(prefill(8192), 1)
    assert " ".join(options).startswith("-npp 8192,1 -ntg 1 -npl 1 -c 8448 ")


def test_a_measurement_is_the_median_of_what_was_printed(programs):
    backend = BatchedBench(programs, Path("model.gguf"), 2)
    first, second = backend.measure(decode(4), 0.5), backend.measure(decode(4), 0.5)
    assert first.rate == pytest.approx(DECODE_RATE)
    assert (first.count, first.cores) == (16, None)
    assert second.rate == first.rate
    once, again = (programs.folder / "calls").read_text().splitlines()
    # the first run measures how long a repeat takes
    assert once.startswith("-npp 64,1 ")
    assert again.startswith("-npp 64,64,64,64,1 ")
    assert once.endswith("-m model.gguf -t 2 -tb 2")


def test_a_run_that_prints_nothing_is_repeated(programs):
    folder = programs.folder
    rows = folder.parent / "rows"
    write_program(
        folder, "llama-batched-bench", f"[ -e {folder}/ran ] && cat {rows}; touch {folder}/ran"
    )
    backend = BatchedBench(programs, Path("model.gguf"), 1)
    assert backend.measure(decode(4), 0.5).rate == pytest.approx(DECODE_RATE)
    rows.write_text("")
    with pytest.raises(BackendError, match="printed no measurements"):
        backend.measure(decode(4), 0.5)


def test_a_run_that_crashes_has_its_log_in_the_error(programs):
    write_program(programs.folder, "llama-batched-bench", "echo loading >&2; kill -SEGV $$")
    with pytest.raises(BackendError, match=r"llama.cpp ended with status -11:\nloading"):
        BatchedBench(programs, Path("model.gguf"), 1).measure(decode(4), 0.5)


def test_the_server_has_fixed_threads_and_slots(programs):
    command = make_server_command(
        programs, Path("m.gguf"), 8080, threads=2, slots=32, positions=65536
    )
    line = " ".join(command)
    assert "--parallel 32 --cont-batching --kv-unified --ctx-size 65536" in line
    assert "--threads 2 --threads-batch 2" in line


def write_folder(folder: Path, shape: ModelShape, form: Format) -> dict[str, mx.array]:
    weights = cpu_models.make_weights(shape, form)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return weights


def dequantize(arrays: dict[str, mx.array], path: str, form: Format, group: int) -> np.ndarray:
    weight = arrays[f"{path}.weight"]
    if form.bits is not None:
        scales, biases = arrays[f"{path}.scales"], arrays[f"{path}.biases"]
        weight = mx.dequantize(weight, scales, biases, group_size=group, bits=form.bits)
    return np.array(weight.astype(mx.float32))


@pytest.mark.parametrize("form", ["f32", "bf16", "q8", "q4", "q4-bf16", "q4-g32"])
def test_stored_weights_are_those_of_mlx(tmp_path, form):
    chosen = FORMATS[form]
    weights = write_folder(tmp_path, QWEN, chosen)
    stored = StoredWeights(tmp_path, QWEN, chosen)
    plain = [name for name in weights if name.endswith(".weight")]
    assert sorted(stored.names()) == sorted(plain)
    for path in ("model.embed_tokens", "model.layers.1.mlp.down_proj"):
        expected = dequantize(weights, path, chosen, chosen.group)
        # MLX rounds to the type of the scales
        tolerance = 1e-2 if form == "q4-bf16" else 1e-6
        assert np.allclose(stored.read(f"{path}.weight"), expected, atol=tolerance)


@pytest.mark.parametrize(
    ("form", "error"), [("f32", 0), ("bf16", 0), ("q8", 0.7 / 127), ("q4", 1.05 / 8)]
)
def test_a_gguf_file_has_the_weights_and_mlx_reads_it(tmp_path, form, error):
    """error: of a weight, as a share of the largest one."""
    chosen = FORMATS[form]
    write_folder(tmp_path, QWEN, chosen)
    stored = StoredWeights(tmp_path, QWEN, chosen)
    cpu_gguf.write(tmp_path / "model.gguf", stored)
    loaded = mx.load(str(tmp_path / "model.gguf"), return_metadata=True)
    assert isinstance(loaded, tuple)
    arrays, metadata = loaded
    assert isinstance(arrays, dict)
    assert metadata["general.architecture"] == "qwen3"
    assert metadata["qwen3.attention.head_count_kv"].item() == 2
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == QWEN.vocab
    assert tokens[3 + ord("a")] == "<0x61>"
    assert np.array(arrays["blk.1.attn_q_norm.weight"]).tolist() == [1.0] * QWEN.head_dim
    for name, theirs in (("model.embed_tokens", "token_embd"), ("model.layers.1.mlp.up_proj",) * 2):
        path = "blk.1.ffn_up" if theirs == name else theirs
        expected = stored.read(f"{name}.weight")
        found = dequantize(arrays, path, chosen, group=32)
        assert np.abs(found - expected).max() <= error * np.abs(expected).max() + 1e-7


BLOCKS = replace(QWEN, width=256, heads=8, inner=512, layers=8)
# layers whose values and second MLP matrix llama-quantize stores in Q6_K in a file of Q4_K_M
MORE_BITS = (0, 3, 6, 7)


@pytest.mark.parametrize(
    ("form", "most", "some", "embedding"),
    [("Q4_K_M", "Q4_K", "Q6_K", "Q6_K"), ("Q6_K", *3 * ["Q6_K"]), ("Q8_0", *3 * ["Q8_0"])],
)
def test_random_blocks_have_the_types_of_llama_quantize(
    tmp_path, monkeypatch, form, most, some, embedding
):
    monkeypatch.setitem(cast(Any, cpu_models.SHAPES), "blocks", BLOCKS)
    cpu_models.write(tmp_path, "blocks", form)
    tensors = reader.read(tmp_path / "model.gguf").tensors
    assert tensors["token_embd.weight"].type.name == embedding
    for i in range(BLOCKS.layers):
        for path in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
            assert tensors[f"blk.{i}.{path}.weight"].type.name == most
        for path in ("attn_v", "ffn_down"):
            expected = some if i in MORE_BITS else most
            assert tensors[f"blk.{i}.{path}.weight"].type.name == expected
    model = cpu_mlx.load(tmp_path / "model.gguf")
    hidden = model(mx.array([[1, 2, 3]]), model.make_kv())
    assert np.isfinite(np.array(hidden)).all()


def test_queries_of_a_llama_are_in_the_order_that_llama_cpp_rotates(tmp_path):
    write_folder(tmp_path, LLAMA, FORMATS["f32"])
    stored = StoredWeights(tmp_path, LLAMA, FORMATS["f32"])
    cpu_gguf.write(tmp_path / "model.gguf", stored)
    arrays = mx.load(str(tmp_path / "model.gguf"))
    assert isinstance(arrays, dict)
    ours = stored.read("model.layers.0.self_attn.q_proj.weight")
    theirs = np.array(arrays["blk.0.attn_q.weight"])
    half = LLAMA.head_dim // 2
    # the second head: our halves are their neighbours
    start = LLAMA.head_dim
    assert (theirs[start] == ours[start]).all()
    assert (theirs[start + 1] == ours[start + half]).all()
    assert (theirs[start + 2] == ours[start + 1]).all()
    values = stored.read("model.layers.0.self_attn.v_proj.weight")
    assert (np.array(arrays["blk.0.attn_v.weight"]) == values).all()


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no folder")
@pytest.mark.parametrize("shape", [LLAMA, QWEN], ids=lambda shape: shape.kind)
def test_llama_cpp_generates_the_tokens_of_our_model(tmp_path, shape):
    weights = write_folder(tmp_path, shape, FORMATS["f32"])
    cpu_gguf.write(tmp_path / "model.gguf", StoredWeights(tmp_path, shape, FORMATS["f32"]))
    model = architectures.build(cpu_models.make_config(shape, FORMATS["f32"]), weights)
    prompt, expected, kv = [300, 301, 350, 399], list[int](), model.make_kv()
    ids = mx.array([prompt])
    for _ in range(12):
        ids = mx.argmax(model.logits(model(ids, kv)[:, -1]), axis=-1)[None]
        expected.append(cast(int, ids.item()))
    programs = find_programs()
    assert programs is not None
    body = {"prompt": prompt, "n_predict": 12, "temperature": 0, "return_tokens": True}
    with run_llama_server(programs, tmp_path / "model.gguf", 1) as server:
        url = f"http://127.0.0.1:{server.port}/completion"
        reply = httpx.post(url, json={**body, **server.fields}, timeout=60)
    assert reply.json()["tokens"] == expected


OPENVINO_LOGITS = """
import json, sys
from pathlib import Path
from typing import cast
import numpy as np
from benchmarks.cpu_cells import FORMATS, ModelShape
from benchmarks.cpu_openvino import OpenVinoWorker
from benchmarks.cpu_weights import StoredWeights

folder, form = sys.argv[1:3]
shape, ids = map(json.loads, sys.argv[3:])
weights = StoredWeights(Path(folder), ModelShape(**shape), FORMATS[form])
worker = OpenVinoWorker(weights, 1, KV_CACHE_PRECISION="f32", DYNAMIC_QUANTIZATION_GROUP_SIZE=0)
whole = worker.infer(np.array([ids]), 0).copy()
worker.reset()
worker.infer(np.array([ids[:-1]]), 0)
print(json.dumps([whole[0].tolist(), worker.infer(np.array([ids[-1:]]), len(ids) - 1)[0].tolist()]))
"""


@pytest.mark.skipif("OPENVINO" not in os.environ, reason="OPENVINO names no Python")
@pytest.mark.parametrize("form", ["f32", "q8", "q4"])
@pytest.mark.parametrize("shape", [LLAMA, QWEN], ids=lambda shape: shape.kind)
def test_the_graph_for_openvino_computes_the_logits_of_our_model(tmp_path, shape, form):
    chosen = FORMATS[form]
    weights = write_folder(tmp_path, shape, chosen)
    config = cpu_models.make_config(shape, chosen)
    model = architectures.build(config, weights)
    ids = [5, 17, 99, 300, 301, 7]
    hidden = model(mx.array([ids]), model.make_kv())
    expected = np.array(model.logits(hidden[:, -1]).astype(mx.float32))[0]
    fields = {name: getattr(shape, name) for name in ModelShape.__dataclass_fields__}
    command = [os.environ["OPENVINO"], "-c", OPENVINO_LOGITS, str(tmp_path), form]
    command += [json.dumps(fields), json.dumps(ids)]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    whole, stepped = (np.array(logits) for logits in json.loads(printed))
    # quantized weights are quantized again, and their activations are bfloat16 where it is fast
    tolerance = {"f32": 1e-3, "q8": 0.05, "q4": 0.35}[form] * np.abs(expected).max()
    assert np.abs(whole - expected).max() < tolerance
    assert np.abs(stepped - whole).max() < 0.05 * np.abs(expected).max()
