"""Averages the weights of models that were trained from one another (Wortsman et al., 2022, "model
soups"): a mean of several rounds answers more new questions than each of them.

Knows: the files of a model folder. Must not know: how the weights were trained. Run
`python -m tools.builtin_model.average FOLDER... --out FOLDER`; needs the packages of
requirements.txt.
"""

import argparse
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

_SHARED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

Arrays = dict[str, np.ndarray[Any, Any]]


def average_weights(folders: Sequence[Path]) -> Arrays:
    """Returns the mean of the weights of the folders, each with the same share."""
    models = [load_file(folder / "model.safetensors") for folder in folders]
    return {
        name: np.stack([model[name] for model in models])
        .mean(axis=0, dtype=np.float64)
        .astype(np.float32)
        for name in models[0]
    }


def check_same_files(folders: Sequence[Path]) -> None:
    """Exits if two models differ in more than their weights, because such a mean has no meaning."""
    for name in _SHARED_FILES:
        if len({(folder / name).read_bytes() for folder in folders}) > 1:
            raise SystemExit(
                f"The models have different files {name}. Average only models that were trained "
                "from one another."
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="the folders of the models")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the mean to")
    options = parser.parse_args()
    folders: list[Path] = options.folders
    out: Path = options.out
    check_same_files(folders)
    weights = average_weights(folders)
    out.mkdir(parents=True, exist_ok=True)
    if out not in folders:
        for name in _SHARED_FILES:
            shutil.copyfile(folders[0] / name, out / name)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    print(f"wrote {out}, model.safetensors sha256 {digest}")


if __name__ == "__main__":
    main()
