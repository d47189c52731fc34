"""How a byte-level tokenizer of a GGUF file splits text, by the name in `tokenizer.ggml.pre`, and
the components of tokenizer.json that do not depend on the file.

Knows: the splitting rules of published tokenizers, as components of tokenizer.json. Must not know:
vocabularies, files.

The rules are those of the models' own tokenizer.json files (llama.cpp's comments in llama-vocab.cpp
quote them), not llama.cpp's adaptations. A name that is not listed is rejected: with the wrong
rules, a tokenizer returns wrong tokens only for some texts, so the mistake would not be noticed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Component = Mapping[str, Any]

# maps bytes to characters; the second one also splits text as GPT-2 does
BYTE_LEVEL: Component = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}
_GPT2: Component = {**BYTE_LEVEL, "use_regex": True}
_DIGITS: Component = {"type": "Digits", "individual_digits": True}
_NFC: Component = {"type": "NFC"}


def split(pattern: str) -> Component:
    """Returns the component that makes each match of a regular expression a separate part."""
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def join_components(kind: str, components: Sequence[Component]) -> Component:
    """Returns the component that applies these in order. kind: the key of their list."""
    if len(components) == 1:
        return components[0]
    return {"type": "Sequence", kind: list(components)}


def make_bpe(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any
) -> Component:
    """Returns the model of a tokenizer that merges pairs of tokens, the first ones first. options:
    those that differ from the defaults."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
        **options,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """components: the pre-tokenizers, applied in order. normalizer: changes the text before them.
    ignores_merges: whether a part that is a token is not computed by merges, which need not lead to
    it."""

    components: Sequence[Component]
    normalizer: Component | None = None
    ignores_merges: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _split_words(
    *, digits: str, letters: str = r"\p{L}", others: str = r"[^\s\p{L}\p{N}]"
) -> Component:
    """Returns the split of Llama 3, Qwen and others, which differ in how many digits belong
    together, and in whether a combining mark belongs to a word."""
    return split(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}| ?{others}+[\r\n]*|"
        f"{_SPACES}"
    )


def _split_by_case(
    *,
    contractions: str,
    digits: str,
    excluded: str = "",
    first: str = "",
    line_ends: str = r"[\r\n/]",
) -> Component:
    """Returns the split of GPT-4o, Tekken and Kimi, where a capital letter begins a new part.
    excluded: an intersection that removes letters from the words. first: alternatives that are
    tried first. line_ends: the characters that belong to the symbols before them."""
    capitals = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    small = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return split(
        rf"{first}{before}{capitals}*{small}+{contractions}|"
        rf"{before}{capitals}+{small}*{contractions}|"
        rf"\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+{line_ends}*|{_SPACES}"
    )


_CL100K = PreTokenizer(components=(_split_words(digits="{1,3}"), BYTE_LEVEL))
_LLAMA3 = PreTokenizer(components=_CL100K.components, ignores_merges=True)
_QWEN2 = PreTokenizer(components=(_split_words(digits=""), BYTE_LEVEL), normalizer=_NFC)
_QWEN35 = PreTokenizer(
    components=(
        _split_words(digits="", letters=r"[\p{L}\p{M}]", others=r"[^\s\p{L}\p{M}\p{N}]"),
        BYTE_LEVEL,
    ),
    normalizer=_NFC,
)
_GPT4O = PreTokenizer(
    components=(_split_by_case(contractions=f"{_CONTRACTIONS}?", digits="{1,3}"), BYTE_LEVEL)
)
_TEKKEN = PreTokenizer(
    components=(_split_by_case(contractions="", digits=""), BYTE_LEVEL), ignores_merges=True
)
_DIGITS_GPT2 = PreTokenizer(components=(_DIGITS, _GPT2))
_DEEPSEEK_V3 = PreTokenizer(
    components=(
        split(r"\p{N}{1,3}"),
        split("[一-龥぀-ゟ゠-ヿ]+"),
        split(
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?"""
            r"""[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
        ),
        BYTE_LEVEL,
    )
)
KIMI = PreTokenizer(
    components=(
        _split_by_case(
            contractions=f"{_CONTRACTIONS}?",
            digits="{1,3}",
            excluded=r"&&[^\p{Han}]",
            first=r"[\p{Han}]+|",
            line_ends=r"[\r\n]",
        ),
        BYTE_LEVEL,
    ),
    ignores_merges=True,
)
# letters with a case, as DeepSeek's first tokenizer enumerates them; the escaped ones would change
# in an editor that applies NFC
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙ"
    "ὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIAN = split("[一-龥ࠀ-一가-퟿]+")
_DEEPSEEK_LLM = PreTokenizer(
    components=(
        split(r"[\r\n]"),
        split(rf"\s?[{_CASED_LETTERS}]+"),
        split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        split(r"\s+$"),
        _ASIAN,
        _DIGITS,
        BYTE_LEVEL,
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    components=(
        split(r"[\r\n]"),
        split(r"\s?\p{L}+"),
        split(r"\s?\p{P}+"),
        _ASIAN,
        _DIGITS,
        BYTE_LEVEL,
    )
)
_SEED_CODER = PreTokenizer(
    components=(
        split(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}|"
            rf" ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
        ),
        BYTE_LEVEL,
    )
)
_FALCON = PreTokenizer(
    components=(
        {"type": "Punctuation", "behavior": "Contiguous"},
        _GPT2,
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(components=(_GPT2,)),
    "phi-2": PreTokenizer(components=(_GPT2,)),
    "roberta-bpe": PreTokenizer(components=(_GPT2,)),
    # GPT-NeoX and its descendants
    "olmo": PreTokenizer(components=(_GPT2,), normalizer=_NFC),
    "mpt": PreTokenizer(components=(_GPT2,), normalizer=_NFC),
    "falcon": _FALCON,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3,
    "falcon3": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _CL100K,
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "minimax-m2": _GPT4O,
    "kimi-k2": KIMI,
    "tekken": _TEKKEN,
    # of Pixtral and later Mistral models, which use Tekken's rules; llama.cpp uses Llama 3's
    "pixtral": _TEKKEN,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": PreTokenizer(components=_DIGITS_GPT2.components, normalizer=_NFC),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "seed-coder": _SEED_CODER,
}
