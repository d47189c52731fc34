"""Writes tests/store/gguf/unigram_reference.json: a small Unigram that SentencePiece has trained,
and its tokens for texts. It needs the package sentencepiece:

    python -m tests.store.gguf.unigram_reference CORPUS

CORPUS: text, of which 60,000 characters are used (alice_in_wonderland.txt). The table of characters
has only a few of the rules of nmt_nfkc, so that the file is small.
"""

import base64
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("unigram_reference.json")

# what becomes what: spaces, a removed character, ligatures, wide letters, composed letters
RULES = (
    *(("\t", " "), ("\n", " "), ("\r", " "), ("\u00a0", " "), ("\u3000", " "), ("\u200b", "")),
    *(("\ufb01", "fi"), ("\u2460", "1"), ("\uff21", "A"), ("\uff42", "b"), ("e\u0301", "\u00e9")),
)

TEXTS = (
    *("", " ", "a", "Alice", "  Alice  was\tbeginning \n\n to get", "don't", "x" * 40, "caf\u00e9"),
    *("cafe\u0301 e\u0301e", "\ufb01nd \u2460\u2460", "\uff21\uff42c", "a\u200bb", "\u4e2d\u6587"),
    *("\u3000wide\u00a0space ", "\U0001f600\U0001f44d \U0001f600", "a\U0001f600b"),
    *(
        "1,234.5 $9",
        "So she was considering in her own mind",
        "CURIOUSER and curiouser!",
        "\r\n\r\na",
    ),
)

# SentencePiece's methods and the numbers of token_type
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3


def main(corpus: Path) -> None:
    import sentencepiece  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.tsv"
        rules.write_text("".join(f"{_hex(old)}\t{_hex(new)}\n" for old, new in RULES))
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus.read_text("utf-8")[:60_000].splitlines()),
            model_writer=model,
            vocab_size=400,
            model_type="unigram",
            normalization_rule_tsv=str(rules),
            num_threads=1,
        )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    from sentencepiece import sentencepiece_model_pb2

    made: Any = sentencepiece_model_pb2
    proto = made.ModelProto()
    proto.ParseFromString(model.getvalue())
    tokens = [
        (
            processor.id_to_piece(id),
            float(f"{processor.get_score(id):.9g}"),
            _UNKNOWN
            if processor.is_unknown(id)
            else _CONTROL
            if processor.is_control(id)
            else _NORMAL,
        )
        for id in range(processor.get_piece_size())
    ]
    written = {
        "charsmap": base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode(),
        "tokens": tokens,
        "texts": [(text, processor.encode(text)) for text in TEXTS],
    }
    FILE.write_text(json.dumps(written, separators=(",", ":")) + "\n")


def _hex(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
