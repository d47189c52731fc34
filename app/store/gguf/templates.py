"""Chat templates of families, for GGUF files without one.

Knows: the turn markers of families that were published before chat templates were stored in GGUF
files. Must not know: Go templates, rendering.

A family is recognized by its marker tokens. A file without known markers is rejected for chats,
because models answer poorly with the markers of a different family. It can still complete plain
text.
"""

from collections.abc import Mapping
from pathlib import Path

from app.store.gguf.errors import translate_gguf_errors
from app.store.gguf.tokenizer import read_vocabulary
from models.gguf.ollama_variant import read_model

_MARK = "IMAGE"
# the content of a message of texts and images, with a mark for each image
_PARTS = (
    "{% macro join(content) %}{% if content is iterable and content is not string %}"
    "{% for part in content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% else %}{{ content }}{% endif %}{% endmacro %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}"
    "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ join(message.content) }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content + '\n\n' %}{% else %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ ns.system }}{{ join(message.content) | trim }}<end_of_turn>\n{% set ns.system = '' %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# the format of Mistral Small 3 and Ministral 3, whose vocabulary is byte-level (mistral-common's V7
# with Tekken); the spaces in that of SentencePiece's vocabularies differ
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "[SYSTEM_PROMPT]{{ join(message.content) }}[/SYSTEM_PROMPT]{% elif message.role == 'user' %}"
    "[INST]{{ join(message.content) }}[/INST]{% else %}{{ join(message.content) }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
_PHI3 = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_REFUSAL = (
    "{{ raise_exception('the only chat template of this model is in the Go format of Ollama: "
    "send a plain prompt to /v1/completions, or use a newer file of the model') }}"
)

# marker tokens -> template; all markers must be in the vocabulary
_TEMPLATES: Mapping[tuple[str, ...], str] = {
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"): _LLAMA3,
    ("<|im_start|>", "<|im_end|>"): _CHATML,
    ("<start_of_turn>", "<end_of_turn>"): _GEMMA,
    ("<|user|>", "<|assistant|>", "<|end|>"): _PHI3,
}
_MISTRAL_MARKERS = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")

# token of an image -> the text that marks an image
_MARKS: Mapping[str, str] = {
    "<start_of_image>": "<start_of_image>",
    "<|image_pad|>": "<|vision_start|><|image_pad|><|vision_end|>",
    "[IMG]": "[IMG]",
}


def find_template(path: Path) -> str:
    """Returns the template of the family of a GGUF file, or one that rejects every conversation
    with a message. Raises AppError(MODEL_FILES)."""
    with translate_gguf_errors():
        vocabulary = read_vocabulary(read_model(path))
    tokens = frozenset(vocabulary.tokens)
    known = {**_TEMPLATES, _MISTRAL_MARKERS: _MISTRAL} if vocabulary.kind == "gpt2" else _TEMPLATES
    found = (template for markers, template in known.items() if tokens.issuperset(markers))
    mark = next((mark for token, mark in _MARKS.items() if token in tokens), "")
    return _PARTS.replace(_MARK, mark) + next(found, _REFUSAL)
