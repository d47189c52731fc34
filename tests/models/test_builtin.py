"""The files of the built-in model: tokenizer, template, config, weights. Engine tests check its
responses over HTTP."""

import json
import struct
from collections.abc import Mapping
from itertools import chain
from typing import Any, cast

import jinja2
import mlx.core as mx
import pytest
from tokenizers import Tokenizer

from models.architectures import build
from tools.builtin_model.corpus import Conversation, generate_corpus
from tools.builtin_model.evaluate import BUILTIN
from tools.builtin_model.numpy_llama import NumpyLlama
from tools.builtin_model.tokenization import (
    CHAT_TEMPLATE,
    TURN_END,
    encode,
    render,
    render_question,
    train_tokenizer,
)

FOLDER = BUILTIN
MOST_BYTES = 8_000_000

SHORT = Conversation(turns=(("Hi", "Hello!"), ("2 + 2?", "2 plus 2 is 4.")), system="Be kind.")


def read_json(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def template() -> jinja2.Template:
    text = read_json("tokenizer_config.json")["chat_template"]
    return jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text)


def messages(conversation: Conversation) -> list[Mapping[str, str]]:
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    turns = chain.from_iterable(
        ({"role": "user", "content": ask}, {"role": "assistant", "content": answer})
        for ask, answer in conversation.turns
    )
    return [*system, *turns]


@pytest.mark.parametrize(
    "text",
    ["Hello, world!", " 12 + 7 = 19\n\n  x", "naïve café 🦊 日本語", '{"stream": true}\t`x`'],
)
def test_the_tokenizer_is_lossless(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    digits = [token for token in tokenizer.encode("2048 and 17").tokens if token.isdigit()]
    assert digits == list("204817")


def test_tokenizer_training_is_reproducible() -> None:
    conversations = list(generate_corpus(0, 500))
    first, second = (train_tokenizer(conversations, 400).to_str() for _ in range(2))
    assert first == second


def test_the_loss_covers_only_answers_and_their_end_tokens(tokenizer: Tokenizer) -> None:
    encoded = encode(tokenizer, [SHORT])[0]
    learnt = [
        token for token, learn in zip(encoded.ids, encoded.loss_weights, strict=True) if learn
    ]
    assert tokenizer.decode(learnt, skip_special_tokens=False) == (
        "Hello!<|im_end|>2 plus 2 is 4.<|im_end|>"
    )


def test_the_loss_covers_a_plain_text_except_its_beginning(tokenizer: Tokenizer) -> None:
    encoded = encode(tokenizer, [Conversation(text="Once upon a time there was a cat.")])[0]
    assert [bool(share) for share in encoded.loss_weights] == [False, False] + [True] * (
        len(encoded.ids) - 2
    )
    assert encoded.ids[-1] == tokenizer.token_to_id(TURN_END)


def test_the_chat_template_renders_the_training_format(template: jinja2.Template) -> None:
    assert template.render(messages=messages(SHORT), add_generation_prompt=False) == render(SHORT)
    question = [{"role": "user", "content": "Who are you?"}]
    prompt = template.render(messages=question, add_generation_prompt=True)
    assert prompt == render_question("Who are you?")
    assert read_json("tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE


def test_the_chat_template_accepts_a_message_without_content(template: jinja2.Template) -> None:
    silent = [{"role": "assistant", "content": None}]
    rendered = template.render(messages=silent, add_generation_prompt=False)
    assert rendered == "<|im_start|>assistant\n<|im_end|>\n"


def test_a_prompt_and_its_answer_are_a_prefix_of_the_next_prompt(
    template: jinja2.Template, tokenizer: Tokenizer
) -> None:
    history = messages(SHORT)
    first = template.render(messages=history[:2], add_generation_prompt=True) + "Hello!" + TURN_END
    second = template.render(messages=history[:4], add_generation_prompt=True)
    ids = tokenizer.encode(first).ids
    assert tokenizer.encode(second).ids[: len(ids)] == ids


def test_the_folder_is_small() -> None:
    files = [
        path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_all_files_name_the_same_end_of_sequence_token(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(TURN_END)
    assert read_json("config.json")["eos_token_id"] == end
    assert read_json("generation_config.json") == {
        "eos_token_id": [end],
        "pad_token_id": end,
        "do_sample": False,
    }
    assert read_json("tokenizer_config.json")["eos_token"] == TURN_END


def test_the_weights_match_the_config(tokenizer: Tokenizer) -> None:
    with (FOLDER / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    assert shapes == _shapes(read_json("config.json"))
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32"}
    assert read_json("config.json")["vocab_size"] == tokenizer.get_vocab_size()


def _shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    wide, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    shapes = {
        "model.embed_tokens.weight": [config["vocab_size"], wide],
        "model.norm.weight": [wide],
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": [wide],
            "post_attention_layernorm": [wide],
            "self_attn.q_proj": [queries, wide],
            "self_attn.k_proj": [keys, wide],
            "self_attn.v_proj": [keys, wide],
            "self_attn.o_proj": [wide, queries],
            "mlp.gate_proj": [inner, wide],
            "mlp.up_proj": [inner, wide],
            "mlp.down_proj": [wide, inner],
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in of_layer.items()}
    return shapes


def test_the_llama_architecture_generates_the_same_ids_as_the_numpy_reference(
    tokenizer: Tokenizer,
) -> None:
    """models/llama.py against numpy, with greedy sampling and real weights."""
    ids = tokenizer.encode(render_question("Tell me a story about a dog")).ids
    expected = NumpyLlama(FOLDER).generate(ids, 24)
    weights = mx.load(str(FOLDER / "model.safetensors"))
    assert isinstance(weights, dict)
    model = build(read_json("config.json"), weights)
    kv = model.make_kv()
    generated: list[int] = []
    fresh = ids
    while len(generated) < len(expected):
        hidden = model(mx.array([fresh]), kv)
        fresh = [cast(int, mx.argmax(model.logits(hidden[:, -1])).item())]
        generated += fresh
    assert len(expected) == 24
    assert generated == expected
