"""`mlxrunner show`: a report of a model without reading its tensors."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import pytest

from app.commands.show import show
from app.core.errors import AppError
from app.core.settings import ModelSettings, Settings
from models import kernels
from tests import tiny, tiny_vision
from tests.models.published_weights import write_fp8
from tests.store.gguf.files import write_tiny
from tests.store.ollama_store import GO_TEMPLATE, OllamaStore, packed_folder

needs_kernels = pytest.mark.skipif(
    kernels.ops() is None, reason=f"no kernels: {kernels.describe().why}"
)


def test_the_report_fits_in_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ollama = OllamaStore(tmp_path / "ollama")
    layers = ollama.model(packed_folder(tmp_path / "packed"))
    parameters = {"temperature": 0.5, "num_ctx": 512, "stop": ["</s>"]}
    layers_of_settings = [
        ollama.layer("system", b"You are terse. " * 20),
        ollama.layer("template", GO_TEMPLATE.encode()),
        ollama.json("params", parameters),
    ]
    ollama.write("tiny:4b", [*layers, *layers_of_settings])
    assert (
        show(Settings(models=(ModelSettings(name="tiny:4b"),), memory=1 << 30), as_json=False) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert lines[0] == "tiny:4b"
    for expected in (
        "architecture  llama",
        "% 4-bit affine",
        "context       4096 tokens",
        "chat template tokenizer_config.json",
        "default       temperature 0.5",
        "default       context 512",
        "for one sequence of 512 tokens",
        "fits in the 1.00 GiB available",
    ):
        assert expected in text
    assert all(len(line) <= 80 for line in lines if "path" not in line)


def test_a_text_of_the_model_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ollama = OllamaStore(tmp_path / "ollama")
    model = ollama.layer("model", write_tiny(tmp_path / "tiny.gguf").read_bytes())
    ollama.write("tiny", [model, ollama.layer("system", b"\x1b]0;title\x07Be terse.")])
    show(Settings(models=(ModelSettings(name="tiny"),), memory=1 << 30), as_json=False)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"system prompt \x1b]0;title\x07Be terse." in shown


def test_the_report_tells_whether_the_model_processes_images(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_vision.write(tmp_path / "vision")
    for path, vision, expected in (
        (folder, True, "text, images"),
        (folder, False, "text"),
        (tiny_model, True, "text"),
    ):
        settings = Settings(models=(ModelSettings(name=str(path)),), vision=vision)
        show(settings, as_json=False)
        assert re.search(f"^  input +{expected}$", capsys.readouterr().out, re.MULTILINE)
        show(settings, as_json=True)
        modalities = json.loads(capsys.readouterr().out)["input_modalities"]
        assert ("image" in modalities) == ("image" in expected)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (1 << 30, "fits in the 1.00 GiB"),
        (1 << 10, "does not fit in the 1.00 KiB available at any context length"),
    ],
)
def test_the_report_tells_whether_the_model_fits(
    tiny_model: Path, memory: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show(Settings(models=(ModelSettings(name=str(tiny_model)),), memory=memory), as_json=False)
    assert expected in capsys.readouterr().out


def test_a_context_that_the_model_does_not_have_is_a_warning(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serve` warned, and `show` seemed to confirm the context."""
    for context, expected in ((4096, ""), (9999, "mlxrunner: --context 9999 exceeds the context ")):
        models = (ModelSettings(name=str(tiny_model)),)
        show(Settings(models=models, context=context), as_json=True)
        out, err = capsys.readouterr()
        assert err.startswith(expected)
        assert bool(err) == bool(expected)
        assert json.loads(out)["fit"]["context"] == 4096


def test_each_model_is_shown_with_its_own_settings(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON output is a sequence of objects."""
    name = str(tiny_model)
    settings = Settings(
        models=(
            ModelSettings(name=name, alias="one", context=256),
            ModelSettings(name=name, alias="two", memory=1 << 29),
            ModelSettings(name="builtin"),
        ),
        memory=1 << 30,
        context=128,
    )
    assert show(settings, as_json=True) == 0
    objects = capsys.readouterr().out.replace("}\n{", "},{")
    fits = [model["fit"] for model in json.loads(f"[{objects}]")]
    assert [fit["context"] for fit in fits] == [256, 128, 128]
    assert [fit["budget"] for fit in fits] == [1 << 30, 1 << 29, 1 << 30]


def test_the_json_has_numbers(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(
        Settings(models=(ModelSettings(name=str(tiny_model)),), context=1024, parallel=2),
        as_json=True,
    )
    report = json.loads(capsys.readouterr().out)
    count = sum(array.size for array in tiny.weights().values())
    assert (report["parameters"], report["bits"]) == (count, 32.0)
    assert (report["fit"]["context"], report["fit"]["sequences"]) == (1024, 2)
    assert report["template"] == "tokenizer_config.json"
    assert report["context_length"] == 4096


def test_converted_weights_are_shown_with_their_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(write_fp8(tmp_path / "tiny"))
    show(Settings(models=(ModelSettings(name=name),)), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("  converted     14 weights from fp8 to bfloat16")
    sizes = re.fullmatch(r" +([\d.]+) kB in the files, ([\d.]+) kB in memory", lines[place + 1])
    assert sizes is not None
    assert float(sizes[1]) < float(sizes[2])
    show(Settings(models=(ModelSettings(name=name),)), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["converted"] == "14 weights from fp8 to bfloat16"
    assert report["file_bytes"] < report["bytes"]


def test_the_types_of_a_gguf_file_are_shown_for_each_group_of_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose_type(name: str) -> gguf.GGMLQuantizationType | None:
        types = gguf.GGMLQuantizationType
        return {"token_embd.weight": types.Q8_0, "output.weight": None}.get(
            name, types.Q5_0 if "blk.0.ffn_down" in name else types.Q4_0
        )

    path = write_tiny(
        tmp_path / "m.gguf", hidden_size=64, intermediate_size=64, quantize=choose_type
    )
    settings = Settings(models=(ModelSettings(name=str(path)),))
    show(settings, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "  norms         F32",
        "  embeddings    Q8_0",
        "  output        F32",
        "  feed forward  83.3 % Q4_0, 16.7 % Q5_0",
        "  attention     Q4_0",
    ):
        assert line in lines
    show(settings, as_json=True)
    types = json.loads(capsys.readouterr().out)["types"]
    assert types["feed forward"] == {"Q4_0": 5 * 64 * 64, "Q5_0": 64 * 64}
    show(Settings(models=(ModelSettings(name="builtin"),)), as_json=True)
    assert json.loads(capsys.readouterr().out)["types"] is None


@needs_kernels
@pytest.mark.parametrize(("bits", "activations"), [(None, None), (4, 24), (8, 24)])
def test_the_precision_of_activations_is_that_with_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: Any, activations: int | None
) -> None:
    """The model is in float32; see `--activations`."""
    name = str(tiny.write(tmp_path / "tiny", hidden_size=64, intermediate_size=128))
    settings = Settings(models=(ModelSettings(name=name),), quantize=bits)
    show(settings, as_json=True)
    assert json.loads(capsys.readouterr().out)["activations"] == activations
    show(settings, as_json=False)
    line = f"  activations   {activations} bits in 4- and 8-bit layers"
    assert (line in capsys.readouterr().out.splitlines()) is (activations is not None)


def test_no_tensor_is_read(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = mx.get_active_memory()
    show(Settings(models=(ModelSettings(name=str(tiny_model)),)), as_json=False)
    assert mx.get_active_memory() == before


def test_a_broken_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AppError, match=r"has no config\.json: it is not a model folder"):
        show(Settings(models=(ModelSettings(name=str(tmp_path)),)), as_json=False)
