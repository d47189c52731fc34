"""Writes a store as Ollama does: manifests by name, blobs by digest."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from app.store.model_names import OllamaName, parse_ollama_name
from tests import tiny

MEDIA = "application/vnd.ollama.image."

# wide enough for groups of 64
CONFIG: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}

_CONFIG = {"model_format": "safetensors", "model_family": "llama"}

GO_TEMPLATE = "{{ range .Messages }}{{ .Role }}: {{ .Content }}\n{{ end }}"


class OllamaStore:
    """root: the folder of OLLAMA_MODELS."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True, exist_ok=True)

    def blob(self, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (self.root / "blobs" / f"sha256-{digest}").write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    def path_of(self, layer: Mapping[str, Any]) -> Path:
        return self.root / "blobs" / layer["digest"].replace(":", "-")

    def layer(self, kind: str, content: bytes, name: str | None = None) -> dict[str, Any]:
        name_field = {} if name is None else {"name": name}
        return {"mediaType": MEDIA + kind, **self.blob(content), **name_field}

    def json(self, kind: str, value: Any, name: str | None = None) -> dict[str, Any]:
        return self.layer(kind, json.dumps(value).encode(), name)

    def tensors(self, arrays: Mapping[str, mx.array], name: str, **metadata: str) -> dict[str, Any]:
        """One tensor layer: a weight, together with its scales and biases."""
        file = self.root / "temporary.safetensors"
        mx.save_safetensors(str(file), dict(arrays), metadata=metadata)
        layer = self.layer("tensor", file.read_bytes(), name)
        file.unlink()
        return layer

    def write(
        self,
        name: str,
        layers: list[dict[str, Any]],
        config: Mapping[str, Any] = _CONFIG,
    ) -> Path:
        blob = self.json("", config)
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {**blob, "mediaType": "application/vnd.docker.container.image.v1+json"},
            "layers": layers,
        }
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(manifest))
        return path

    def path(self, name: str) -> Path:
        found = parse_ollama_name(name)
        assert isinstance(found, OllamaName)
        return self.root / "manifests" / found.host / found.namespace / found.model / found.tag

    def model(self, folder: Path, *, seed: int = 0) -> list[dict[str, Any]]:
        """The layers of tests.tiny's model, quantized to 4 bits where possible. folder: the source
        of its small files."""
        config = {**tiny.CONFIG, **CONFIG}
        layers: list[dict[str, Any]] = []
        for name, weight in tiny.weights(config, seed).items():
            if weight.ndim == 2:
                packed, scales, biases = mx.quantize(weight, group_size=64, bits=4)
                arrays = {name: packed, f"{name}.scale": scales, f"{name}.bias": biases}
                layers.append(self.tensors(arrays, name, quant_type="int4", group_size="64"))
            else:
                layers.append(self.tensors({name: weight}, name))
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            layers.append(self.layer("json", (folder / file).read_bytes(), file))
        return layers


def packed_folder(folder: Path, *, seed: int = 0) -> Path:
    """The same model in a folder, quantized in MLX's format."""
    tiny.write(folder, seed=seed, **CONFIG, quantization={"group_size": 64, "bits": 4})
    config = {**tiny.CONFIG, **CONFIG}
    arrays: dict[str, mx.array] = {}
    for name, weight in tiny.weights(config, seed).items():
        if weight.ndim == 2:
            owner = name.removesuffix(".weight")
            packed = mx.quantize(weight, group_size=64, bits=4)
            names = (name, f"{owner}.scales", f"{owner}.biases")
            arrays.update(zip(names, packed, strict=True))
        else:
            arrays[name] = weight
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder
