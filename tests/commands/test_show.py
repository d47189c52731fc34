"""What is said of a model that was not read."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from app.commands.show import show
from app.core.errors import AppError
from app.core.settings import ModelSettings, Settings
from tests import tiny
from tests.store.ollama_store import GO_TEMPLATE, OllamaStore, packed_folder


def test_the_words_stay_within_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ollama = OllamaStore(tmp_path / "ollama")
    layers = ollama.model(packed_folder(tmp_path / "packed"))
    parameters = {"temperature": 0.5, "num_ctx": 512, "stop": ["</s>"]}
    more = [
        ollama.layer("system", b"You are terse. " * 20),
        ollama.layer("template", GO_TEMPLATE.encode()),
        ollama.json("params", parameters),
    ]
    ollama.write("tiny:4b", [*layers, *more])
    assert (
        show(Settings(models=(ModelSettings(name="tiny:4b"),), memory=1 << 30), as_json=False) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert lines[0] == "tiny:4b"
    for words in (
        "architecture  llama",
        "% 4-bit affine",
        "context       4096 tokens",
        "chat template tokenizer_config.json",
        "default       temperature 0.5",
        "default       context 512",
        "for one sequence of 512 tokens",
        "fits in the 1.00 GiB available",
    ):
        assert words in text
    assert all(len(line) <= 80 for line in lines if "path" not in line)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (1 << 30, "fits in the 1.00 GiB"),
        (1 << 10, "does not fit in the 1.00 KiB available at any context length"),
    ],
)
def test_it_says_whether_it_fits(
    tiny_model: Path, memory: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show(Settings(models=(ModelSettings(name=str(tiny_model)),), memory=memory), as_json=False)
    assert words in capsys.readouterr().out


def test_each_model_is_shown_with_what_holds_for_it(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In JSON one object behind the other."""
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
    told = capsys.readouterr().out.replace("}\n{", "},{")
    fits = [found["fit"] for found in json.loads(f"[{told}]")]
    assert [fit["context"] for fit in fits] == [256, 128, 128]
    assert [fit["budget"] for fit in fits] == [1 << 30, 1 << 29, 1 << 30]


def test_programs_get_numbers(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(
        Settings(models=(ModelSettings(name=str(tiny_model)),), context=1024, parallel=2),
        as_json=True,
    )
    found = json.loads(capsys.readouterr().out)
    count = sum(array.size for array in tiny.weights().values())
    assert (found["parameters"], found["bits"]) == (count, 32.0)
    assert (found["fit"]["context"], found["fit"]["sequences"]) == (1024, 2)
    assert found["template"] == "tokenizer_config.json"
    assert found["context_length"] == 4096


def test_no_tensor_is_read(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = mx.get_active_memory()
    show(Settings(models=(ModelSettings(name=str(tiny_model)),)), as_json=False)
    assert mx.get_active_memory() == before


def test_a_broken_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AppError, match=r"has no config\.json: it is not a model folder"):
        show(Settings(models=(ModelSettings(name=str(tmp_path)),)), as_json=False)
