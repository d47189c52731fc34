"""Encoding and decoding, compared with the library and known encodings, and edge cases."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from app.core.errors import AppError, ErrorKind
from app.text.tokenizer import ModelStopConditions, Tokenizer, find_model_stop_conditions
from tests import tiny, tiny_encoder

SEEDS = st.lists(st.floats(0, 1, exclude_max=True), max_size=40)


def ids_of(tokenizer: Tokenizer, positions: list[float]) -> list[int]:
    """Ids at relative positions in the vocabulary, so that one strategy works for all sizes."""
    return [int(position * tokenizer.vocab_size) for position in positions]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    id = tokenizer.token_to_id(token)
    assert id is not None
    return id


def describe_row(row: dict) -> str:
    return f"{row['tokenizer']}: {row['text']!r}"


class TestEncoding:
    def test_equals_other_implementations(self, shared, real_files):
        rows = (shared / "tokenizers/fixtures_upstream.jsonl").read_text().splitlines()
        loaded: dict[str, Tokenizer] = {}
        failures: list[str] = []
        for row in map(json.loads, rows):
            name = row["tokenizer"]
            if name not in loaded:
                loaded[name] = Tokenizer.load(real_files(f"tokenizers/{name}"))
            ids = loaded[name].encode(row["text"], add_special_tokens=row["add_special_tokens"])
            if ids != row["ids"]:
                failures.append(describe_row(row))
        assert len(rows) == 402
        assert failures == []

    def test_equals_llama2c(self, shared, real_files):
        rows = (shared / "tokenizers/fixtures_llama2c.jsonl").read_text().splitlines()
        loaded: dict[str, Tokenizer] = {}
        failures: list[str] = []
        for row in map(json.loads, rows):
            name = row["tokenizer"]
            if name not in loaded:
                loaded[name] = Tokenizer.load(real_files(f"models/{name}"))
            if loaded[name].encode(row["text"], add_special_tokens=True) != row["ids"]:
                failures.append(describe_row(row))
        assert rows
        assert failures == []

    def test_an_unpaired_surrogate_is_a_client_error(self, pieces):
        with pytest.raises(AppError, match="surrogate") as caught:
            pieces.encode("a\ud800b", add_special_tokens=True)
        assert caught.value.kind is ErrorKind.INVALID

    def test_a_text_without_tokens_is_a_client_error(self):
        vocabulary = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
        with pytest.raises(AppError, match="tokenizer cannot encode the text") as caught:
            Tokenizer(vocabulary).encode("b", add_special_tokens=False)
        assert caught.value.kind is ErrorKind.INVALID

    def test_truncation_and_padding_of_the_file_are_ignored(self, tokenizers_by_kind):
        inner = tokenizers.Tokenizer.from_str(tokenizers_by_kind["byte_level"].to_str())
        inner.enable_truncation(4)
        inner.enable_padding(length=16)
        assert len(Tokenizer(inner).encode("x" * 10, add_special_tokens=False)) == 10
        assert len(Tokenizer(inner).encode("x", add_special_tokens=False)) == 1


class TestBeginningOfText:
    def test_follows_the_post_processor_without_a_config_value(self, files, tokenizers_by_kind):
        tokenizer = Tokenizer.load(files(tokenizers_by_kind["sentence_piece"]))
        assert tokenizer.encode("the", add_special_tokens=True)[0] == 1
        plain = Tokenizer.load(
            files(tokenizers_by_kind["byte_level"], tokenizer_config={"bos_token": "<|begin|>"})
        )
        assert plain.encode("x", add_special_tokens=True) == plain.encode(
            "x", add_special_tokens=False
        )

    def test_the_config_overrides_the_post_processor(self, files, tokenizers_by_kind):
        config = {"bos_token": "<s>", "add_bos_token": False}
        tokenizer = Tokenizer.load(
            files(tokenizers_by_kind["sentence_piece"], tokenizer_config=config)
        )
        assert 1 not in tokenizer.encode("the", add_special_tokens=True)
        config = {"bos_token": {"content": "<|begin|>"}, "add_bos_token": True}
        tokenizer = Tokenizer.load(files(tokenizers_by_kind["byte_level"], tokenizer_config=config))
        assert tokenizer.bos_token_id == id_of(tokenizer, "<|begin|>")
        assert tokenizer.encode("x", add_special_tokens=True) == [
            tokenizer.bos_token_id,
            *tokenizer.encode("x", add_special_tokens=False),
        ]

    def test_bos_is_not_doubled(self, files, tokenizers_by_kind):
        config = {"bos_token": "<s>", "add_bos_token": True}
        pieces = Tokenizer.load(
            files(tokenizers_by_kind["sentence_piece"], tokenizer_config=config)
        )
        assert pieces.encode("<s>the", add_special_tokens=True).count(1) == 1
        assert pieces.encode("the", add_special_tokens=True).count(1) == 1
        assert pieces.encode("", add_special_tokens=True) == [1]

    def test_the_beginning_may_be_several_tokens(self, tokenizers_by_kind):
        inner = tokenizers.Tokenizer.from_str(tokenizers_by_kind["word_piece"].to_str())
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] [SEP] $A", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
        tokenizer = Tokenizer(inner, bos_token_id=2, add_bos=True)
        ids = tokenizer.encode("cat", add_special_tokens=True)
        assert ids[:2] == [1, 2]
        assert tokenizer.encode("[CLS] [SEP] cat", add_special_tokens=True) == ids

    def test_a_model_without_bos_adds_nothing(self, tokenizers_by_kind):
        bare = Tokenizer(tokenizers_by_kind["byte_level"], bos_token_id=None, add_bos=True)
        assert bare.encode("x", add_special_tokens=True) == bare.encode(
            "x", add_special_tokens=False
        )

    def test_eos_is_never_added(self, pieces, tokenizers_by_kind):
        assert tokenizers_by_kind["sentence_piece"].encode("the").ids[-1] == 2
        assert 2 not in pieces.encode("the", add_special_tokens=True)

    def test_the_bos_id_may_be_in_the_model_config(self, files, tokenizers_by_kind):
        inner = tokenizers_by_kind["sentence_piece"]
        assert Tokenizer.load(files(inner, config={"bos_token_id": 1})).bos_token_id == 1
        assert Tokenizer.load(files(inner, config={"bos_token_id": 99999})).bos_token_id is None
        both = files(inner, config={"bos_token_id": 2}, generation_config={"bos_token_id": 1})
        assert Tokenizer.load(both).bos_token_id == 1
        assert Tokenizer.load(files(inner)).bos_token_id is None


class TestDecoding:
    @pytest.mark.product
    @given(positions=SEEDS)
    def test_equals_the_library(self, library, positions):
        """Except invalid byte tokens, which the library decodes differently: tested below."""
        tokenizer = Tokenizer(library)
        ids = ids_of(tokenizer, positions)
        text, verbatim = tokenizer.decode(ids), tokenizer.decode_verbatim(ids)
        byte_tokens = tokenizer.byte_decoder is not None and not tokenizer.byte_decoder.alphabet
        if not (byte_tokens and "\ufffd" in verbatim):
            assert text == library.decode(ids)
            assert verbatim == library.decode(ids, skip_special_tokens=False)

    @given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
    def test_restores_the_encoded_text(self, bytewise, pieces, text):
        for tokenizer in (bytewise, pieces):
            assert (
                tokenizer.decode_verbatim(tokenizer.encode(text, add_special_tokens=False)) == text
            )

    def test_an_invalid_byte_does_not_affect_valid_ones(self, pieces):
        """The library decodes this to three U+FFFD."""
        ids = [id_of(pieces, f"<0x{byte:02X}>") for byte in (0xC3, 0xA9, 0xFF)]
        assert pieces.decode(ids) == "é\ufffd"

    def test_hides_special_tokens_or_writes_them_out(self, bytewise):
        ids = [id_of(bytewise, "<|begin|>"), *bytewise.encode("hé", add_special_tokens=False)]
        assert bytewise.decode(ids) == "hé"
        assert bytewise.decode_verbatim(ids) == "<|begin|>hé"

    @pytest.mark.parametrize("id", [-1, 10_000, 1 << 40])
    def test_an_unknown_id_is_invisible_or_rejected(self, bytewise, id):
        assert bytewise.decode([id, 65]) == bytewise.decode([65])
        assert bytewise.token_bytes(id) == b""
        with pytest.raises(AppError, match=f"{id} is not a token") as caught:
            bytewise.decode_verbatim([65, id])
        assert caught.value.kind is ErrorKind.INVALID


class TestTokenBytes:
    @given(positions=SEEDS)
    def test_joined_bytes_are_the_text(self, byte_spelling_library, positions):
        tokenizer = Tokenizer(byte_spelling_library)
        ids = ids_of(tokenizer, positions)
        text = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
        if tokenizer.byte_decoder is not None and tokenizer.byte_decoder.strips_leading_space:
            text = text.removeprefix(" ")
        assert tokenizer.decode_verbatim(ids) == text

    def test_byte_level_tokens_have_their_bytes(self, bytewise):
        def bytes_of(token: str) -> bytes:
            return bytewise.token_bytes(id_of(bytewise, token))

        assert bytes_of("Ġthe") == b" the"
        assert bytes_of("ðŁ") == b"\xf0\x9f"
        assert bytes_of("日本") == "日本".encode()
        assert bytes_of("  ") == b"  "
        assert bytes_of("<|end|>") == b"<|end|>"

    def test_sentence_pieces_have_their_bytes(self, pieces):
        assert pieces.token_bytes(id_of(pieces, "▁the")) == b" the"
        assert pieces.token_bytes(id_of(pieces, "<0x0A>")) == b"\n"
        assert pieces.token_text(id_of(pieces, "<0xF0>")) == "\ufffd"

    def test_words_keep_the_leading_space(self, tokenizers_by_kind):
        words = Tokenizer(tokenizers_by_kind["word_piece"])
        assert words.token_text(id_of(words, "cat")) == " cat"
        assert words.token_text(id_of(words, "##ing")) == "ing"


class TestLoading:
    def test_a_missing_file_is_named(self, files):
        with pytest.raises(AppError, match=r"tokenizer\.json is missing") as caught:
            Tokenizer.load(files())
        assert caught.value.kind is ErrorKind.MODEL_FILES

    @pytest.mark.parametrize("text", ["", "{", "{}", '{"model": {"type": "Novel"}}', "\x00"])
    def test_an_invalid_file_is_a_one_line_error(self, files, text):
        with pytest.raises(AppError, match="is not a usable tokenizer") as caught:
            Tokenizer.load(files(text))
        assert caught.value.kind is ErrorKind.MODEL_FILES
        assert "\n" not in caught.value.message

    def test_a_vocabulary_without_letters_or_an_unknown_token_is_rejected(self, files):
        inner = tokenizers.Tokenizer(models.WordLevel({"word": 0}, unk_token="[UNK]"))
        with pytest.raises(AppError, match="is not a usable tokenizer"):
            Tokenizer.load(files(inner))

    def test_a_large_real_tokenizer_loads(self, real_files):
        assert Tokenizer.load(real_files("tokenizers/qwen3")).vocab_size == 151_669


class TestHostile:
    """tokenizer.json is untrusted input."""

    def test_a_text_that_makes_the_library_panic_is_rejected(self, files):
        """A PanicException is not an Exception: no handler caught it, not even the server's."""
        inner = tiny.tokenizer()
        inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
        tokenizer = Tokenizer.load(files(inner))
        with pytest.raises(AppError, match=r"cannot encode the text: .*retry-limit") as caught:
            tokenizer.encode("x" * 40, add_special_tokens=False)
        assert caught.value.kind is ErrorKind.INVALID
        assert tokenizer.encode("hey", add_special_tokens=False)

    def test_a_file_that_makes_the_library_panic_is_a_one_line_error(self, files):
        inner = tiny.tokenizer()
        inner.normalizer = normalizers.Replace(tokenizers.Regex("(x+x+)+y"), "x")
        config = json.loads(inner.to_str())
        # added tokens are normalized when they are read
        config["added_tokens"][0] |= {"content": "x" * 40, "normalized": True}
        with pytest.raises(AppError, match="is not a usable tokenizer: ") as caught:
            Tokenizer.load(files(json.dumps(config)))
        assert caught.value.kind is ErrorKind.MODEL_FILES
        assert "\n" not in caught.value.message

    def test_ids_that_make_the_library_panic_are_a_client_or_model_files_error(
        self, tokenizers_by_kind
    ):
        inner = tokenizers.Tokenizer.from_str(tokenizers_by_kind["word_suffix"].to_str())
        inner.add_tokens(["x" * 40])
        broken = decoders.Replace(tokenizers.Regex("(x+x+)+y"), "x")
        inner.decoder = decoders.Sequence([broken, decoders.BPEDecoder()])
        tokenizer = Tokenizer(inner)
        ids = [id_of(tokenizer, "x" * 40)]
        with pytest.raises(AppError, match=r"cannot decode tokens: .*retry-limit") as caught:
            tokenizer.decode(ids)
        assert caught.value.kind is ErrorKind.MODEL_FILES
        with pytest.raises(AppError, match="tokenizer cannot decode tokens") as caught:
            tokenizer.decode_verbatim(ids)
        assert caught.value.kind is ErrorKind.INVALID

    def test_a_file_that_multiplies_texts_is_rejected_when_loaded(self, files):
        """Six of these turn one letter into 10^18, and the failed allocation ends the process."""
        inner = tiny.tokenizer()
        inner.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 6)
        with pytest.raises(AppError, match=r"its normalizers can make a text 1e\+18 times as") as e:
            Tokenizer.load(files(inner))
        assert e.value.kind is ErrorKind.MODEL_FILES


class TestStops:
    def test_stops_are_the_eos_ids_of_the_config_and_the_tokenizer(self, files, tokenizers_by_kind):
        inner = tokenizers_by_kind["sentence_piece"]
        eos_config = {"tokenizer_config": {"eos_token": "</s>"}}
        for fields, expected in [
            (eos_config, {2}),
            ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, {2}),
            ({**eos_config, "config": {"eos_token_id": 7}}, {2, 7}),
            ({**eos_config, "config": {"eos_token_id": [7, 8]}}, {2, 7, 8}),
            ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": 9}}, {9}),
            (
                {
                    **eos_config,
                    "config": {"eos_token_id": 7},
                    "generation_config": {"eos_token_id": [9, 10]},
                },
                {2, 9, 10},
            ),
            (
                {
                    **eos_config,
                    "config": {"eos_token_id": -1},
                    "generation_config": {"eos_token_id": None},
                },
                {2},
            ),
            ({**eos_config, "config": {"eos_token_id": []}}, {2}),
            ({"tokenizer_config": {"eos_token": "nowhere"}}, set()),
            ({"config": {"eos_token_id": [7, 10**6, 1 << 40]}}, {7}),
            ({}, set()),
        ]:
            model = files(inner, **fields)
            assert find_model_stop_conditions(model, Tokenizer.load(model)) == ModelStopConditions(
                ids=frozenset(expected), strings=()
            )

    @pytest.mark.parametrize(
        ("family", "tokens", "config", "generation", "eos", "ends"),
        [
            # as released, and as in conversions without generation_config.json
            ("gemma3", ["<eos>", "<end_of_turn>"], [0, 1], [0, 1], "<eos>", {0, 1}),
            ("gemma3", ["<eos>", "<end_of_turn>"], [0, 1], None, "<eos>", {0, 1}),
            ("llama3", ["<|end_of_text|>", "<|eot_id|>"], 0, [0, 1], "<|eot_id|>", {0, 1}),
            ("llama3", ["<|end_of_text|>", "<|eot_id|>"], 0, None, "<|eot_id|>", {0, 1}),
            ("qwen", ["<|endoftext|>", "<|im_end|>"], 1, [1, 0], "<|im_end|>", {0, 1}),
            ("qwen", ["<|endoftext|>", "<|im_end|>"], 0, None, "<|im_end|>", {0, 1}),
            # its <|end|> ends a message, not the answer
            (
                "gpt_oss",
                ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"],
                1,
                [1, 0, 3],
                "<|return|>",
                {0, 1, 3},
            ),
        ],
    )
    def test_stops_of_published_models(self, files, family, tokens, config, generation, eos, ends):
        inner = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        inner.add_special_tokens(tokens)
        ids = [id_of(Tokenizer(inner), token) for token in tokens]

        def select_ids(positions):
            return (
                [ids[position] for position in positions]
                if isinstance(positions, list)
                else ids[positions]
            )

        model = files(
            inner,
            config={"model_type": family, "eos_token_id": select_ids(config)},
            generation_config={}
            if generation is None
            else {"eos_token_id": select_ids(generation)},
            tokenizer_config={"eos_token": eos},
        )
        assert find_model_stop_conditions(model, Tokenizer.load(model)).ids == {
            ids[position] for position in ends
        }

    def test_stop_strings_that_are_special_tokens_become_ids(self, files, tokenizers_by_kind):
        model = files(tokenizers_by_kind["byte_level"])
        found = find_model_stop_conditions(
            model, Tokenizer.load(model), ("<|end|>", "日本", "User:", "h")
        )
        end = id_of(Tokenizer.load(model), "<|end|>")
        assert found == ModelStopConditions(ids=frozenset({end}), strings=("日本", "User:", "h"))

    @pytest.mark.parametrize("value", ["</s>", 1.5, True, [2, "x"], {"a": 1}, -7])
    def test_stops_must_be_ids(self, files, tokenizers_by_kind, value):
        model = files(tokenizers_by_kind["sentence_piece"], config={"eos_token_id": value})
        with pytest.raises(AppError, match=r"eos_token_id in config\.json") as caught:
            find_model_stop_conditions(model, Tokenizer.load(model))
        assert caught.value.kind is ErrorKind.MODEL_FILES

    def test_an_invalid_bos_id_is_named(self, files, tokenizers_by_kind):
        with pytest.raises(AppError, match=r"bos_token_id in config\.json"):
            Tokenizer.load(
                files(tokenizers_by_kind["sentence_piece"], config={"bos_token_id": "<s>"})
            )

    def test_stops_of_a_real_model(self, real_files):
        model = real_files("models/stories260K")
        assert find_model_stop_conditions(model, Tokenizer.load(model)).ids == {1, 2}


@pytest.mark.parametrize(("length", "kept"), [(10, 10), (80, 80), (1000, 80), (10**6, 80)])
def test_a_text_far_beyond_the_limit_is_truncated(bytewise, length, kept):
    """kept: the first 8 characters per token are always encoded together."""
    assert len(bytewise.truncate_text("ab" * (length // 2), 10)) == kept


def test_a_long_text_of_few_tokens_is_kept_whole():
    word = AddedToken("x" * 100)
    inner = tiny.tokenizer()
    inner.add_tokens([word])
    text = word.content * 30
    assert Tokenizer(inner).truncate_text(text, 100) == text


def test_a_text_that_grows_too_much_is_rejected(files):
    """A factor of 1000 is accepted in a file, but not for a megabyte of text."""
    inner = tiny.tokenizer()
    inner.normalizer = normalizers.Replace("q", "q" * 1000)
    tokenizer = Tokenizer.load(files(inner))
    assert len(tokenizer.encode("q", add_special_tokens=False)) == 1000
    assert len(tokenizer.encode("w" * 200_000, add_special_tokens=False)) == 200_000
    with pytest.raises(
        AppError, match="too long after this model's tokenizer has normalized it"
    ) as caught:
        tokenizer.encode("w" * 200_000 + "q" * 200_000, add_special_tokens=False)
    assert caught.value.kind is ErrorKind.INVALID
    with pytest.raises(AppError, match="surrogate"):
        tokenizer.encode("\ud800" + "w" * 200_000, add_special_tokens=False)


def test_positions_of_a_text_are_numbers_of_ids(
    byte_spelling_library: tokenizers.Tokenizer,
) -> None:
    """The ids before a position are those of the text before it, or one fewer, because tokens
    merge."""
    tokenizer = Tokenizer(byte_spelling_library)
    text = "the cat sat, and the other cats sat on 日本. é"
    positions = [0, 4, 7, 13, 30, len(text)]
    ids, counts = tokenizer.encode_with_positions(text, positions, add_special_tokens=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert counts == sorted(counts)
    for position, count in zip(positions, counts, strict=True):
        before = tokenizer.encode(text[:position], add_special_tokens=False)
        assert len(before) - 3 <= count <= len(before)
        assert before[:count] == ids[:count]


def test_a_position_beside_an_added_token_has_all_ids_before_it(
    tokenizers_by_kind: dict[str, tokenizers.Tokenizer],
) -> None:
    tokenizer = Tokenizer(tokenizers_by_kind["byte_level"])
    text = "the<|end|>the"
    ids, counts = tokenizer.encode_with_positions(text, [3, 10, 12], add_special_tokens=False)
    assert counts == [2, 3, 3]
    assert tokenizer.encode_with_positions(text, [], add_special_tokens=False) == (ids, [])


class TestPairs:
    """Two texts in one input, for a reranker."""

    def encode(self, first: str, second: str, max_tokens: int = 100) -> tuple[list[int], int]:
        return Tokenizer(tiny_encoder.tokenizer()).encode_pair(first, second, max_tokens)

    def test_the_segments_are_those_of_the_post_processor(self):
        ids, first = self.encode("w0 w1", "w2")
        assert (ids, first) == ([1, 3, 4, 2, 5, 2], 4)

    def test_the_end_of_the_second_text_is_removed(self):
        whole, first = self.encode("w0", "w1 w2 w3")
        assert self.encode("w0", "w1 w2 w3", 6) == ([*whole[:5], whole[-1]], first)

    def test_a_first_text_that_leaves_no_room_is_an_error(self):
        with pytest.raises(AppError) as caught:
            self.encode("w0 w1 w2", "w3", 6)
        assert (caught.value.kind, caught.value.param) == (ErrorKind.CONTEXT_LENGTH, "query")

    def test_a_lone_surrogate_is_an_error(self):
        with pytest.raises(AppError) as caught:
            self.encode("w0", chr(0xD800))
        assert caught.value.kind is ErrorKind.INVALID
