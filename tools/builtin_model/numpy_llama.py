"""Greedy generation from the files of a model folder, in numpy: slow, simple, and independent of
the engine.

Knows: the Llama architecture, config.json and model.safetensors, read as any other program would.
Must not know: how the model was trained or is evaluated.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tools.builtin_model.tokenization import render_question

Array = np.ndarray[Any, Any]


def make_answerer(folder: Path, max_tokens: int = 400) -> Callable[[str], str]:
    """Returns a function that maps a question to the model's greedy answer of at most `max_tokens`
    tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    llama = NumpyLlama(folder)

    def answer(question: str) -> str:
        ids = llama.generate(tokenizer.encode(render_question(question)).ids, max_tokens)
        return tokenizer.decode(ids)

    return answer


class NumpyLlama:
    """Generates one sequence at a time. Uses a KV cache; every step attends to all cached
    positions."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Array] = load_file(folder / "model.safetensors")
        self._head = self.weights["model.embed_tokens.weight"].T
        half = self.config["head_dim"] // 2
        self._frequency = self.config["rope_theta"] ** (-np.arange(half) / half)

    def generate(self, ids: list[int], max_tokens: int) -> list[int]:
        """Generates token IDs greedily after `ids`, up to but excluding the end-of-turn token."""
        layers: list[tuple[Array, Array] | None] = [None] * self.config["num_hidden_layers"]
        said: list[int] = []
        fresh, position = ids, 0
        while len(said) < max_tokens:
            hidden = self._step(np.array(fresh), position, layers)
            position += len(fresh)
            token = int(np.argmax(hidden @ self._head))
            if token == self.config["eos_token_id"]:
                break
            said.append(token)
            fresh = [token]
        return said

    def _step(self, ids: Array, position: int, layers: list[tuple[Array, Array] | None]) -> Array:
        """Returns the hidden state of the last token in `ids`, whose positions start at
        `position`."""
        hidden = self.weights["model.embed_tokens.weight"][ids]
        for number in range(len(layers)):
            at = f"model.layers.{number}."
            normed = self._norm(hidden, f"{at}input_layernorm.weight")
            mixed, layers[number] = self._attend(
                normed, f"{at}self_attn.", position, layers[number]
            )
            hidden = hidden + mixed
            normed = self._norm(hidden, f"{at}post_attention_layernorm.weight")
            gate = normed @ self.weights[f"{at}mlp.gate_proj.weight"].T
            inner = (
                gate / (1 + np.exp(-gate)) * (normed @ self.weights[f"{at}mlp.up_proj.weight"].T)
            )
            hidden = hidden + inner @ self.weights[f"{at}mlp.down_proj.weight"].T
        return self._norm(hidden[-1], "model.norm.weight")

    def _attend(
        self, hidden: Array, at: str, position: int, past: tuple[Array, Array] | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """(length, wide) -> (length, wide), and keys and values (shared heads, positions so far,
        dim)."""
        length, dim = len(hidden), self.config["head_dim"]
        query, key, value = (
            (hidden @ self.weights[f"{at}{name}.weight"].T).reshape(length, -1, dim).swapaxes(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = self._rotate(query, position), self._rotate(key, position)
        if past is not None:
            key = np.concatenate([past[0], key], axis=1)
            value = np.concatenate([past[1], value], axis=1)
        group = len(query) // len(key)
        scores = query @ np.repeat(key, group, axis=0).swapaxes(1, 2) * np.float32(dim**-0.5)
        later = np.arange(key.shape[1]) > np.arange(position, position + length)[:, None]
        scores = np.where(later, np.float32(-np.inf), scores)
        chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
        chances /= chances.sum(axis=-1, keepdims=True)
        mixed = (chances @ np.repeat(value, group, axis=0)).swapaxes(0, 1).reshape(length, -1)
        return mixed @ self.weights[f"{at}o_proj.weight"].T, (key, value)

    def _feed(self, hidden: Array, at: str) -> Array:
        gate = hidden @ self.weights[f"{at}gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (hidden @ self.weights[f"{at}up_proj.weight"].T)
        return inner @ self.weights[f"{at}down_proj.weight"].T

    def _norm(self, hidden: Array, gain: str) -> Array:
        mean_square = np.mean(hidden * hidden, axis=-1, keepdims=True)
        scale = np.sqrt(mean_square + np.float32(self.config["rms_norm_eps"]))
        return hidden / scale * self.weights[gain]

    def _rotate(self, heads: Array, position: int) -> Array:
        """Applies rope to (heads, length, dim), with pairs of dimensions half a head apart."""
        angle = np.arange(position, position + heads.shape[1])[:, None] * self._frequency
        cosine, sine = np.cos(angle, dtype=np.float32), np.sin(angle, dtype=np.float32)
        low, high = np.split(heads, 2, axis=-1)
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
