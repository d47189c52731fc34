"""The tokenizer and the chat template of the built-in model: converts conversations to token ids.

Knows: the tokenizers library, the format of a conversation. Must not know: what conversations are
about, tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.builtin_model.corpus import Conversation

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# ChatML (OpenAI, 2023). A prompt with its answer is, token by token, the beginning of the next
# turn's prompt, so a prefix cache can keep all of it.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{{- (message['content'] or '') + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# words with the space before them · single digits, so that sums and counts can be learned ·
# punctuation · white space, whose last blank belongs to the next word
_PRETOKENIZER_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# tokens at the beginning of an answer with a higher loss weight
_BOOSTED_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedConversation:
    """A tokenized conversation. ids: the token IDs. loss_weights: the loss weight of each token; 0
    for prompt tokens."""

    ids: list[int]
    loss_weights: list[float]


def make_tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": TURN_END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def render(conversation: Conversation) -> str:
    """Renders a conversation in CHAT_TEMPLATE's format, including all answers."""
    system = _render_turn("system", conversation.system) if conversation.system else ""
    return system + "".join(
        _render_turn("user", ask) + _render_turn("assistant", answer)
        for ask, answer in conversation.turns
    )


def render_question(question: str) -> str:
    """Renders the prompt for one question in CHAT_TEMPLATE's format."""
    return f"{_render_turn('user', question)}{TURN_START}assistant\n"


def train_tokenizer(conversations: Iterable[Conversation], size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer (Sennrich et al., 2016; Radford et al., 2019) with `size`
    entries, starting with the two turn markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRETOKENIZER_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (
        render(made).replace(TURN_START, "").replace(TURN_END, "") or made.text
        for made in conversations
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, conversations: list[Conversation]) -> list[EncodedConversation]:
    """Tokenizes conversations. In a chat, only the answers and their end markers are trained on. In
    plain text, all tokens except the first two are trained on."""
    begins, ends = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)
    assert begins is not None
    assert ends is not None
    opening = [begins, *tokenizer.encode("assistant\n").ids]
    texts = [render(made) or made.text + TURN_END for made in conversations]
    encoded: list[EncodedConversation] = []
    for made, whole in zip(conversations, tokenizer.encode_batch_fast(texts), strict=True):
        ids = whole.ids
        learn = (
            _answer_weights(ids, opening, ends)
            if made.turns
            else [0, 0, *_token_weights(len(ids) - 2)]
        )
        encoded.append(EncodedConversation(ids=ids, loss_weights=learn))
    return encoded


def _render_turn(role: str, content: str) -> str:
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def _answer_weights(ids: list[int], opening: list[int], ends: int) -> list[float]:
    """The loss weights of each answer: from the end of an `opening` to the next `ends`,
    inclusive."""
    learn = [0.0] * len(ids)
    at = len(opening)
    while at < len(ids):
        if ids[at - len(opening) : at] != opening:
            at += 1
            continue
        end = ids.index(ends, at) + 1
        learn[at:end] = _token_weights(end - at)
        at = end
    return learn


def _token_weights(length: int) -> list[float]:
    """The loss weight of each token of an answer. Their sum grows with the square root of the
    length; otherwise a story's hundred tokens would outweigh the twenty of a fact. The first few
    tokens, which show whether the question was understood, count twice."""
    share = length**-0.5
    return [share * (2 if at < _BOOSTED_TOKENS else 1) for at in range(length)]
