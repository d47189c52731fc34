"""A GGUF model with a projector processes images as the same model in a folder does. Projectors are
found next to the model, in repositories and in Ollama's store, and are not models themselves."""

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import AddedToken

from app import store
from app.commands.pull import pull
from app.core.errors import AppError, ErrorKind
from app.core.images import Image
from app.core.model_files import ModelFiles
from app.core.models import ModelRecipe
from app.core.thread_pools import CancelToken
from app.engine.weights import list_parameters, open_model, read_weights
from app.images.plan import ImagePlan
from app.images.processor import load_image_processor
from app.store.gguf.projector import choose_projectors
from app.store.installed import derive_model
from app.store.model_names import parse_ollama_name
from app.store.ollama.create import create_model
from app.text.tokenizer import Tokenizer
from models import architectures
from models.base import select_all
from models.image_inputs import ImageInputs, to_model_ids
from models.mrope import ImageRange, make_positions
from tests import tiny
from tests.models.gguf.converter import Types
from tests.models.test_llama import draw_weights as draw_text
from tests.models.vision.reference import CLIP, draw_image
from tests.models.vision.test_towers import REFERENCE, draw_weights
from tests.store.gguf.converted import PROJECTOR, convert_folder
from tests.store.gguf.files import write_tiny
from tests.store.ollama_store import OllamaStore
from tests.store.stand_in import StandIn
from tests.store.test_ollama import complete_config

HALF = ([0.5] * 3, [0.5] * 3)


@dataclass(frozen=True, kw_only=True)
class Family:
    """text: keys of the text model's config. marks: the special tokens. tokens: the largest number
    of tokens per image. settings: further keys of preprocessor_config.json."""

    architecture: str
    text: Mapping[str, Any]
    marks: tuple[str, ...]
    normalization: Any = HALF
    tokens: int = 64
    settings: Mapping[str, Any] = field(default_factory=dict)
    lacks_image_token: bool = False


_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_SMOL = ("<fake_token_around_image>", "<global-img>", "<image>")
_SMOL_ROWS = tuple(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3))
_QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")

FAMILIES: Mapping[str, Family] = {
    "gemma3": Family(
        architecture="gemma3",
        text={
            **_TEXT,
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        marks=("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        lacks_image_token=True,
    ),
    "gemma4": Family(
        architecture="gemma4",
        text={
            **{key: value for key, value in _TEXT.items() if key != "rope_theta"},
            "model_type": "gemma4_text",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "sliding_window": 8,
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.25,
                },
            },
        },
        marks=("<|image>", "<image|>", "<|image|>"),
        normalization=([0.0] * 3, [1.0] * 3),
        tokens=70,
    ),
    "mistral3": Family(
        architecture="llama",
        text={**_TEXT, "model_type": "mistral"},
        marks=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        normalization=CLIP,
        settings={"size": {"longest_edge": 280}},
    ),
    "smolvlm": Family(
        architecture="llama",
        text={**_TEXT, "model_type": "llama"},
        marks=(*_SMOL, *_SMOL_ROWS),
        settings={"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
    ),
    "lfm2_vl": Family(
        architecture="lfm2",
        text={
            **_TEXT,
            "head_dim": None,
            "model_type": "lfm2",
            "norm_eps": 1e-6,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        marks=("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<image>"),
    ),
    "qwen2_5_vl": Family(
        architecture="qwen2_5_vl",
        text={
            **_TEXT,
            "head_dim": None,
            "model_type": "qwen2_5_vl_text",
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        marks=_QWEN,
        normalization=CLIP,
        settings={"min_pixels": 3136, "max_pixels": 12845056},
    ),
    "qwen3_vl": Family(
        architecture="qwen3_vl",
        text={
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        marks=_QWEN,
    ),
    "qwen3_5": Family(
        architecture="qwen3_5",
        text={
            **_TEXT,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        marks=_QWEN,
    ),
}


def write_folder(name: str, folder: Path) -> Path:
    """A model of the family in the layout of the hub, with random weights."""
    family = FAMILIES[name]
    folder.mkdir(parents=True)
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark) for mark in family.marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {**family.text, "vocab_size": tokenizer.get_vocab_size()}
    text = {key: value for key, value in text.items() if value is not None}
    config = {**REFERENCE[name]["config"], "text_config": text, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    mark = f"{{% if p.type == 'image' %}}{family.marks[0]}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
    template = (
        f"{{% for m in messages %}}{{% for p in m.content %}}{mark}{{% endfor %}}{{% endfor %}}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "add_bos_token": False, "chat_template": template})
    )
    mean, std = family.normalization
    settings = {"image_mean": list(mean), "image_std": list(std), **family.settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    drawn = draw_text({**text, "model_type": family.architecture})
    if name == "lfm2_vl":
        drawn["model.embedding_norm.weight"] = drawn.pop("model.norm.weight")
    weights = {
        f"language_model.{key}": array for key, array in drawn.items() if key != "lm_head.weight"
    }
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **draw_weights(name)})
    return folder


def convert(name: str, folder: Path, target: Path, **options: Any) -> Path:
    omit = FAMILIES[name].lacks_image_token
    return convert_folder(folder, target, omit_last_token=omit, **options)


def plan_image(files: ModelFiles, tokens: int, size: tuple[int, int]) -> ImagePlan:
    processor = load_image_processor(files, max_tokens=tokens)
    assert processor is not None
    width, height = size
    return processor.plan(Image(data=b"", format="png", width=width, height=height, digest=b""))


def compute_logits(files: ModelFiles, plan: ImagePlan) -> np.ndarray:
    """The logits of a prompt with one image."""
    model: Any = open_model(files, None)
    read_weights(model, files.path, lambda percent, memory: None)
    tower = architectures.get_tower(model)
    assert tower is not None
    tokenizer = Tokenizer.load(files)
    ids = list(tokenizer.encode(f"see {plan.text}, and?", add_special_tokens=False))
    image = tokenizer.added_token_to_id(plan.token)
    rows = [index for index, id in enumerate(ids) if id == image]
    assert len(rows) == plan.num_tokens
    pixels = draw_image([(tile.height, tile.width) for tile in plan.tiles])
    features = tower.encode([mx.array(tile) for tile in pixels])
    is_mrope = model.image_rules.positions == "mrope"
    images = ImageInputs(
        rows=mx.array(rows, dtype=mx.int32),
        features=features.rows,
        deepstack=features.deepstack,
        positions=make_positions([ImageRange(rows[0], *plan.grid)], 0, len(ids))
        if is_mrope
        else None,
        groups=[(rows[0], rows[-1] + 1)] if model.image_rules.atomic else (),
    )
    known = to_model_ids([-1 if id == image else id for id in ids])
    hidden = model(mx.array([known]), model.make_kv(), select_all, images)
    return np.array(model.logits(hidden)[0].astype(mx.float32))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_logits_of_a_prompt_with_an_image_are_those_of_the_folder(tmp_path: Path, name: str):
    folder = write_folder(name, tmp_path / "folder")
    path = convert(name, folder, tmp_path / "converted")
    found = []
    for place in (folder, path):
        files = complete_config(store.resolve(str(place)))
        plan = plan_image(files, FAMILIES[name].tokens, (100, 80))
        found.append((plan, compute_logits(files, plan)))
    [(expected_plan, expected), (plan, logits)] = found
    assert plan == expected_plan
    # the decay of a delta net is stored as its exponential
    near = 1e-5 if name == "qwen3_5" else 0
    np.testing.assert_allclose(logits, expected, rtol=0, atol=near)
    assert np.ptp(logits) > 1, "equal logits prove nothing"


def test_matrices_in_float16_give_the_logits_of_a_folder_with_such_matrices(tmp_path: Path):
    folder = write_folder("qwen3_vl", tmp_path / "folder")
    path = convert("qwen3_vl", folder, tmp_path / "converted", quantize=lambda name: Types.F16)
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    rounded = {
        key: array.astype(mx.float16) if array.ndim > 1 else array for key, array in loaded.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), rounded)
    found = []
    for place in (folder, path):
        files = complete_config(store.resolve(str(place)))
        found.append(compute_logits(files, plan_image(files, 64, (100, 80))))
    assert np.array_equal(*found)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """The file of a model, next to its projector."""
    folder = write_folder("qwen3_vl", tmp_path / "folder")
    return convert("qwen3_vl", folder, tmp_path / "pair")


def has_vision(files: ModelFiles) -> bool:
    return load_image_processor(files) is not None


def test_the_projector_is_found_beside_the_file(pair: Path):
    for name in (pair, pair.parent):
        files = complete_config(store.resolve(str(name)))
        assert files.shards == (pair,)
        assert files.projector_path == pair.parent / PROJECTOR
        assert has_vision(files)
    sizes = [path.stat().st_size for path in (pair, pair.parent / PROJECTOR)]
    assert sizes[0] < files.weight_bytes < sum(sizes)
    alone = store.resolve(str(shutil.copy(pair, pair.parent.parent / "alone.gguf")))
    assert alone.projector_path is None
    assert alone.weights_digest != files.weights_digest
    assert not has_vision(complete_config(alone))


def test_without_vision_the_projector_is_not_opened(pair: Path):
    files = complete_config(store.resolve(str(pair)))
    (pair.parent / PROJECTOR).unlink()
    text: Any = open_model(files, None, vision=False)
    assert architectures.get_tower(text) is None
    with pytest.raises(AppError, match="--no-vision loads the text model without it"):
        open_model(files, None)


def test_memory_is_estimated_with_the_tower(pair: Path):
    files = complete_config(store.resolve(str(pair)))
    sizes = [
        sum(array.nbytes for array in list_parameters(open_model(files, None, vision=vision)))
        for vision in (False, True)
    ]
    assert sizes[1] - sizes[0] > 100_000


def test_a_projector_is_no_model(pair: Path):
    with pytest.raises(AppError, match="is the vision tower of a model: serve the text model"):
        store.resolve(str(pair.parent / PROJECTOR))


@pytest.mark.parametrize(
    ("model", "names", "expected"),
    [
        ("m-Q4_K_M.gguf", ["mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("m.gguf", ["mmproj-m-f32.gguf", "mmproj-m-bf16.gguf"], "mmproj-m-bf16.gguf"),
        ("m.gguf", ["mmproj-m-Q8_0.gguf", "mmproj-m-F32.gguf"], "mmproj-m-F32.gguf"),
        ("m.gguf", ["mmproj-a.gguf", "mmproj-Q8_0.gguf"], "mmproj-Q8_0.gguf"),
        ("m-Q8_0.gguf", ["m-mmproj-f16.gguf"], "m-mmproj-f16.gguf"),
        ("o_r_m-Q8_0.gguf", ["o_s_mmproj-f16.gguf", "o_r_mmproj.gguf"], "o_r_mmproj.gguf"),
        ("Q8_0/m-Q8_0.gguf", ["mmproj-F16.gguf", "Q4/mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("m.gguf", ["a.gguf", "mmproj.bin", "x-mmproj-F16.gguf"], None),
    ],
)
def test_the_best_projector_of_a_model_is_chosen_by_name(
    model: str, names: list[str], expected: str | None
):
    assert next(iter(choose_projectors(model, names)), None) == expected


def test_the_projector_of_another_model_is_not_used(pair: Path, caplog: pytest.LogCaptureFixture):
    text = write_tiny(pair.parent / "llama.gguf")
    files = store.resolve(str(text))
    assert files.projector_path is None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


BROKEN: Mapping[str, Any] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "no header": lambda content: b"PK" + content,
    "negative count": lambda content: content[:8] + b"\xff" * 8 + content[16:],
    "unknown type": lambda content: content.replace(b"qwen3vl_merger", b"qwen9vl_merger"),
}


@pytest.mark.parametrize(
    "how", ["truncated", "empty", "no header", "negative count", "unknown type"]
)
def test_a_broken_projector_costs_only_the_images(
    pair: Path, caplog: pytest.LogCaptureFixture, how: str
):
    projector = pair.parent / PROJECTOR
    projector.write_bytes(BROKEN[how](projector.read_bytes()))
    files = complete_config(store.resolve(str(pair)))
    assert files.projector_path is None
    [line] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert str(projector) in line
    assert line.endswith("the model cannot process images")
    assert "\n" not in line
    assert open_model(files, None) is not None


def test_wrong_tensors_of_a_projector_are_an_error_with_a_remedy(pair: Path):
    projector = pair.parent / PROJECTOR
    projector.write_bytes(projector.read_bytes().replace(b"v.post_ln.bias", b"v.post_ln.bios"))
    files = complete_config(store.resolve(str(pair)))
    with pytest.raises(AppError) as caught:
        open_model(files, None)
    message = caught.value.message
    assert message.startswith(str(projector))
    assert message.endswith("--no-vision loads the text model without it")
    assert "\n" not in message
    assert open_model(files, None, vision=False) is not None


def test_a_repository_is_downloaded_with_one_projector(
    hub: StandIn, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    remote = tmp_path / "remote"
    remote.mkdir()
    shutil.copy(pair, remote / "Tiny-Q8_0.gguf")
    for kind in ("BF16", "F16", "F32"):
        shutil.copy(pair.parent / PROJECTOR, remote / f"mmproj-{kind}.gguf")
    hub.add("org/Tiny-GGUF", remote)
    pull("org/Tiny-GGUF", None)
    assert "is complete" in capsys.readouterr().out
    files = store.resolve("org/Tiny-GGUF:Q8_0")
    assert files.projector_path is not None
    folder = files.path.parent
    assert sorted(path.name for path in folder.iterdir()) == ["Tiny-Q8_0.gguf", "mmproj-F16.gguf"]
    assert has_vision(complete_config(files))
    # the file itself, which is a link to a blob
    assert has_vision(complete_config(store.resolve(str(folder / "Tiny-Q8_0.gguf"))))
    listed = [entry.name for entry in store.list_installed() if entry.source == "hub"]
    assert listed == ["org/Tiny-GGUF:Q8_0"]


def test_projectors_in_the_folders_of_other_programs_are_found(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    studio = tmp_path / "home" / ".lmstudio" / "models" / "org" / "Tiny-GGUF"
    shutil.copytree(pair.parent, studio)
    (studio / "model.gguf").rename(studio / "Tiny-Q8_0.gguf")
    cache = tmp_path / "llama.cpp"
    cache.mkdir()
    monkeypatch.setenv("LLAMA_CACHE", str(cache))
    shutil.copy(pair, cache / "org_Other-GGUF_Other-F16.gguf")
    shutil.copy(pair.parent / PROJECTOR, cache / "org_Other-GGUF_mmproj-model-f16.gguf")
    shutil.copy(pair.parent / PROJECTOR, cache / "org_Third-GGUF_mmproj-model-f16.gguf")
    names = {one.name for one in store.list_installed() if one.source in ("lm studio", "llama.cpp")}
    assert names == {"Tiny-Q8_0", "org_Other-GGUF_Other-F16"}
    for name in names:
        assert has_vision(complete_config(store.resolve(name)))
    chosen = store.resolve("org_Other-GGUF_Other-F16").projector_path
    assert chosen == cache / "org_Other-GGUF_mmproj-model-f16.gguf"


def test_the_projector_layer_of_a_model_of_ollama_is_used(pair: Path, tmp_path: Path):
    ollama = OllamaStore(tmp_path / "ollama")
    layers = [
        ollama.layer("model", pair.read_bytes()),
        ollama.layer("projector", (pair.parent / PROJECTOR).read_bytes()),
    ]
    ollama.write("tiny", layers)
    files = complete_config(store.resolve("tiny"))
    assert files.projector_path == ollama.path_of(layers[1])
    assert has_vision(files)
    ollama.path_of(layers[1]).write_bytes((pair.parent / PROJECTOR).read_bytes()[:-4] + b"oops")
    with pytest.raises(AppError, match="SHA-256"):
        store.resolve("tiny")


def upload(ollama: OllamaStore, files: Mapping[str, bytes]) -> None:
    """Creates the model `uploaded` as `ollama create` does, from files that were uploaded."""
    digests = {name: ollama.blob(content)["digest"] for name, content in files.items()}
    name = parse_ollama_name("uploaded")
    assert name is not None
    recipe = ModelRecipe(name="uploaded", base=None, files=digests)
    create_model(name, recipe, None, CancelToken())


def test_an_uploaded_model_has_the_projector_that_was_uploaded_with_it(pair: Path, tmp_path: Path):
    ollama = OllamaStore(tmp_path / "ollama")
    # the content of a file and not its name shows what it is
    files = {
        "b.gguf": (pair.parent / PROJECTOR).read_bytes(),
        "a.gguf": pair.read_bytes(),
        "config.json": b"{}",
    }
    upload(ollama, files)
    made = complete_config(store.resolve("uploaded"))
    assert has_vision(made)
    assert made.shards[0].read_bytes() == files["a.gguf"]
    assert made.projector_path is not None
    assert made.projector_path.read_bytes() == files["b.gguf"]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"b.gguf": "projector"}, "files has only a projector: add the GGUF file of the model"),
        ({"a.gguf": "model", "b.gguf": "other"}, "2 GGUF files of the type model, but only one"),
        (
            {"a.gguf": "model", "b.gguf": "projector", "c.gguf": "other projector"},
            "2 GGUF files of the type projector, but only one",
        ),
        (
            {"a.gguf": "model", "b.gguf": "half"},
            "b.gguf is not a usable GGUF file: it is truncated",
        ),
        ({"a.gguf": "model", "b.gguf": "text"}, "b.gguf does not begin as a GGUF file"),
        ({"a.gguf": "model", "m.safetensors": "text"}, "both GGUF and .safetensors files"),
    ],
)
def test_other_sets_of_uploaded_files_are_errors_of_one_line(
    pair: Path, tmp_path: Path, parts: Mapping[str, str], reason: str
):
    model, projector = pair.read_bytes(), (pair.parent / PROJECTOR).read_bytes()
    contents = {
        "model": model,
        "other": model + bytes(32),
        "projector": projector,
        "other projector": projector + bytes(32),
        "half": projector[:400],
        "text": b"no model",
    }
    ollama = OllamaStore(tmp_path / "ollama")
    with pytest.raises(AppError, match=re.escape(reason)) as caught:
        upload(ollama, {name: contents[part] for name, part in parts.items()})
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_a_model_made_from_a_file_has_its_projector(pair: Path):
    base = store.resolve(str(pair))
    derive_model(base, ModelRecipe(name="derived", base=base.name, system="Be terse."))
    derived = complete_config(store.resolve("derived"))
    assert has_vision(derived)
    assert derived.system_prompt == "Be terse."
