"""The mean of the weights of several trained models."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tools.builtin_model.average import main

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def make_model(folder: Path, value: float, config: str = "{}") -> Path:
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(config if name == "config.json" else name)
    save_file({"norm": np.full(3, value, np.float32)}, folder / "model.safetensors")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *folders: Path, out: Path) -> None:
    arguments = ["average", *map(str, folders), "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    main()


def test_each_model_has_the_same_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [make_model(tmp_path / str(value), value) for value in (1, 2, 6)]
    run(monkeypatch, *models, out=tmp_path / "mean")
    mean = load_file(tmp_path / "mean" / "model.safetensors")["norm"]
    assert mean.tolist() == [3, 3, 3]
    assert mean.dtype == np.float32
    for name in FILES:
        assert (tmp_path / "mean" / name).read_bytes() == (models[0] / name).read_bytes()


def test_a_mean_may_replace_one_of_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (make_model(tmp_path / str(value), value) for value in (1, 2))
    run(monkeypatch, first, second, out=first)
    assert load_file(first / "model.safetensors")["norm"].tolist() == [1.5] * 3


def test_models_with_different_configs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_model(tmp_path / "a", 1)
    second = make_model(tmp_path / "b", 2, config='{"hidden_size": 3}')
    with pytest.raises(SystemExit, match=r"different files config\.json"):
        run(monkeypatch, first, second, out=tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
