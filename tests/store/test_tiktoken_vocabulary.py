"""The tokenizer of a tiktoken.model gives the IDs of tiktoken's algorithm.

With a published vocabulary of 151,643 tokens and Kimi's rules, the IDs of 10,000 strings (prose,
code, 18 scripts, runs of one character, random code points) matched tiktoken 0.14.
"""

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from app import store
from app.core.errors import AppError
from app.store.tiktoken_vocabulary import build_tokenizer, write_tokenizer
from tests import tiny

KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "added_tokens_decoder": {
        "400": {"content": "[BOS]", "special": True},
        "401": {"content": "<|tool_call_begin|>", "special": False},
    },
}
# Any text from which pairs can be counted
TEXT = "that's the crew's 12中文 1234\n\n    " * 3 + Path(tiny.__file__).read_text()


def train(count: int) -> dict[bytes, int]:
    """A vocabulary of byte pairs, as tiktoken's is: the most common pair is merged, again and
    again."""
    ranks = {bytes([value]): value for value in range(256)}
    parts = [bytes([value]) for value in TEXT.encode()]
    while len(ranks) < count:
        pairs = Counter(pairwise(parts))
        union = next(a + b for (a, b), _ in pairs.most_common() if a + b not in ranks)
        ranks[union] = len(ranks)
        parts = merge_all(parts, union)
    return ranks


def merge_all(parts: list[bytes], union: bytes) -> list[bytes]:
    merged: list[bytes] = []
    for part in parts:
        if merged and merged[-1] + part == union:
            merged[-1] = union
        else:
            merged.append(part)
    return merged


RANKS = train(400)


def to_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def encode_as_tiktoken(piece: bytes) -> list[int]:
    """Merges the pair whose union has the lowest rank, the first one if there are several."""
    if piece in RANKS:
        return [RANKS[piece]]
    parts = [bytes([value]) for value in piece]
    while True:
        ranked = [(RANKS.get(a + b), at) for at, (a, b) in enumerate(pairwise(parts))]
        found = min(((rank, at) for rank, at in ranked if rank is not None), default=None)
        if found is None:
            return [RANKS[part] for part in parts]
        at = found[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    built = build_tokenizer(Path("tiktoken.model"), to_file(RANKS), KIMI)
    return Tokenizer.from_str(json.dumps(built))


@settings(max_examples=30)
@given(text=st.one_of(st.text(), st.text("that crew's 12中文\n ", max_size=60)))
def test_ids_are_those_of_tiktokens_algorithm(tokenizer: Any, text: str) -> None:
    pieces = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert "".join(pieces) == text
    expected = [id for piece in pieces for id in encode_as_tiktoken(piece.encode())]
    assert tokenizer.encode(text, add_special_tokens=False).ids == expected
    assert tokenizer.decode(expected) == text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("北京市 Pascal", ["北京市", " Pascal"]),
        ("HTMLParser isn't", ["HTMLParser", " isn't"]),
        ("12345 a\n\n b", ["123", "45", " a", "\n\n", " b"]),
        ("a  b", ["a", " ", " b"]),
        ("x += 1;\n", ["x", " +=", " ", "1", ";\n"]),
    ],
)
def test_a_text_is_split_by_the_rules_of_kimi(tokenizer: Any, text: str, pieces: list[str]) -> None:
    spans = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in spans] == pieces


def test_special_tokens_follow_the_vocabulary(tokenizer: Any) -> None:
    assert tokenizer.get_vocab_size() == 400 + 256
    assert tokenizer.encode("[BOS]<|tool_call_begin|>").ids == [400, 401]
    assert tokenizer.encode("<|reserved_token_655|>").ids == [655]
    assert tokenizer.decode([400, 401, 655]) == "<|tool_call_begin|>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "some single bytes have no token"),
        (b"AA== 0\nAQ== 7\n", "line 2 is not a token in base64 and its rank 1"),
        (b"AA== 0\n??? 1\n", "line 2 is not a token"),
        (b"AA== 0\n 1\n", "line 2 is not a token"),
        (b"AA== 0\nAA== 1\n", "line 2 repeats a token"),
        (b"AA== 0\nAQ==\n", "line 2 is not a token"),
        (base64.b64encode(b"a" * 257) + b" 0", "line 1 is not a token"),
    ],
)
def test_an_invalid_file_is_an_error_of_one_line(content: bytes, message: str) -> None:
    with pytest.raises(AppError, match=message) as caught:
        build_tokenizer(Path("folder/tiktoken.model"), content, {})
    assert "folder/tiktoken.model" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "tiktoken.model"
    with file.open("wb") as target:
        target.truncate((16 << 20) + 1)
    with pytest.raises(AppError, match="more than 16777216 bytes"):
        write_tokenizer(file, {})


def write_folder(folder: Path, tokenizer_config: dict[str, Any]) -> Path:
    tiny.write(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_bytes(to_file(RANKS))
    own = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**own, **tokenizer_config}))
    return folder


def test_a_folder_of_kimi_gets_a_tokenizer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "kimi", KIMI)
    files = store.resolve(str(folder))
    assert files.tokenizer_vocab_size == 656
    written = files.tokenizer_path.stat().st_mtime_ns
    assert store.resolve(str(folder)).tokenizer_path.stat().st_mtime_ns == written
    (folder / "tokenizer_config.json").write_text(json.dumps({**KIMI, "added_tokens_decoder": {}}))
    assert store.resolve(str(folder)).tokenizer_path != files.tokenizer_path


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"auto_map": {"AutoTokenizer": ["tokenization_other.Tokenizer", None]}},
        {"auto_map": {"AutoTokenizer": 3}},
        {"auto_map": ["tokenization_kimi.TikTokenTokenizer"]},
    ],
)
def test_a_folder_with_unknown_code_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "other", config)
    with pytest.raises(
        AppError, match=r"has a tiktoken\.model, but no tokenizer\.json: only the model's own code"
    ):
        store.resolve(str(folder))
