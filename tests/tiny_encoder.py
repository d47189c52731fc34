"""Folders of tiny encoders with random weights, as sentence-transformers saves them."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.models import encoder_reference
from tests.models.encoder_reference import draw_tensor

WORDS = [f"w{number}" for number in range(57)]
WIDTH = 32


def tokenizer() -> Tokenizer:
    """One token per word, between [CLS] and [SEP]; unknown words are [UNK]."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return words


def write(
    folder: Path,
    name: str = "bert",
    *,
    pooling: str | None = None,
    dense: tuple[int, ...] = (),
    activation: str = "torch.nn.modules.linear.Identity",
) -> Path:
    """name: of encoder_reference.json. pooling: in 1_Pooling/config.json, or no such file. dense:
    the widths of dense layers after the pooling."""
    folder.mkdir(parents=True)
    case = json.loads(encoder_reference.FILE.read_text())[name]
    # of a RoBERTa, whose positions skip padding, the default would be [CLS]
    (folder / "config.json").write_text(json.dumps({**case["config"], "pad_token_id": 0}))
    weights = {key: mx.array(draw_tensor(key, shape)) for key, shape in case["tensors"].items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        settings = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": False}
        settings[f"pooling_mode_{pooling}"] = True
        (folder / "1_Pooling/config.json").write_text(json.dumps(settings))
        modules.append({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    width = WIDTH
    for number, size in enumerate(dense, 2):
        write_dense(folder / f"{number}_Dense", width, size, activation)
        modules.append({"path": f"{number}_Dense", "type": "sentence_transformers.models.Dense"})
        width = size
    if pooling is not None:
        numbered = [{"idx": i, "name": str(i), **module} for i, module in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(numbered))
    return folder


def write_dense(folder: Path, width: int, size: int, activation: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "in_features": width,
                "out_features": size,
                "bias": False,
                "activation_function": activation,
            }
        )
    )
    drawn = np.random.default_rng(size).standard_normal((size, width)).astype(np.float32)
    mx.save_safetensors(str(folder / "model.safetensors"), {"linear.weight": mx.array(drawn)})
