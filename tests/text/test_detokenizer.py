"""Streaming of ids and texts: the same text for any chunks, complete characters, minimal delay."""

import json
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.text.detokenizer import Detokenizer, StopFinder, VisibleTokens
from app.text.tokenizer import Tokenizer
from tests.line_count import count_lines

PLACES = st.lists(st.floats(0, 1, exclude_max=True), max_size=40)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Few letters, so that stop strings occur, overlap, and begin without ending.
FEW = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


def ids_at(tokenizer: Tokenizer, positions: list[float]) -> list[int]:
    return [int(position * tokenizer.vocab_size) for position in positions]


def stream_text(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = Detokenizer(tokenizer, prompt or [])
    return [*map(stream.feed, ids), stream.flush()]


def byte_ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text)
    return [id for id in ids if id is not None]


class TestDetokenizer:
    @pytest.mark.product
    @given(positions=PLACES)
    def test_any_ids_stream_to_the_decoded_text(self, library, positions):
        tokenizer = Tokenizer(library)
        ids = ids_at(tokenizer, positions)
        expected = tokenizer.decode(ids)
        if tokenizer.byte_decoder is None and "\ufffd" in expected:
            return  # invalid bytes with a decoder that also drops valid characters: tested below
        assert "".join(stream_text(tokenizer, ids)) == expected

    @given(text=TEXTS)
    def test_any_text_streams_to_the_decoded_text(self, library, text):
        tokenizer = Tokenizer(library)
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert "".join(stream_text(tokenizer, ids)) == tokenizer.decode(ids)

    @pytest.mark.product
    @given(positions=PLACES, prompt_positions=PLACES)
    @example(positions=[0.75, 0.5], prompt_positions=[0.75, 0.5, 0.75, 0.5, 0.25])
    def test_continues_the_prompt(self, library, positions, prompt_positions):
        tokenizer = Tokenizer(library)
        ids, prompt = ids_at(tokenizer, positions), ids_at(tokenizer, prompt_positions)
        before, expected = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
        if before.endswith("\ufffd"):
            return  # it may end in half a character: tested below
        if tokenizer.byte_decoder is None and "\ufffd" in expected:
            return
        assert before + "".join(stream_text(tokenizer, ids, prompt)) == expected

    @pytest.mark.product
    @given(text=TEXTS, cut=st.floats(0, 1))
    def test_never_emits_half_a_character(self, byte_spelling_library, text, cut):
        """A valid text streams without U+FFFD, wherever the prompt ends; a character that is split
        by the end of the prompt appears in full."""
        tokenizer = Tokenizer(byte_spelling_library)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "\ufffd" in tokenizer.decode(ids):
            return  # in the text, or a byte without a token, as with Falcon
        position = int(cut * len(ids))
        out = "".join(stream_text(tokenizer, ids[position:], ids[:position]))
        assert "\ufffd" not in out
        assert tokenizer.decode(ids).endswith(out)

    def test_a_character_begun_by_the_prompt_appears_whole(self, pieces, tokenizers_by_kind):
        words = Tokenizer(tokenizers_by_kind["metaspace_bytes"])
        for tokenizer in (pieces, words):
            prompt, ids = byte_ids(tokenizer, b"\xe2\x82"), byte_ids(tokenizer, b"\xac")
            assert "".join(stream_text(tokenizer, ids, prompt)) == "€"

    def test_waits_for_whole_characters(self, bytewise):
        ids = bytewise.encode("🙂é", add_special_tokens=False)
        stream = Detokenizer(bytewise)
        outputs: list[tuple[str, bool]] = []
        for id in ids:
            text = stream.feed(id)
            outputs.append((text, stream.has_partial_character))
        assert outputs == [("", True), ("", True), ("🙂", False), ("é", False)]
        assert stream.flush() == ""

    def test_emits_bytes_that_never_become_a_character(self, pieces):
        stream = Detokenizer(pieces, [1, *pieces.encode("a", add_special_tokens=False)])
        assert [stream.feed(id) for id in byte_ids(pieces, b"\xf0\x9f")] == ["", ""]
        assert stream.feed(byte_ids(pieces, b"!")[0]) == "\ufffd!"
        assert [stream.feed(id) for id in byte_ids(pieces, b"\xf0\x9f")] == ["", ""]
        assert stream.flush() == "\ufffd"
        assert stream.flush() == ""

    def test_the_leading_space_is_stripped_only_at_the_start(self, pieces):
        word = pieces.encode("the", add_special_tokens=False)
        for prompt, expected in [
            ([], "the"),
            ([1], "the"),
            ([1, *pieces.encode("a", add_special_tokens=False)], " the"),
            (pieces.encode("", add_special_tokens=False), "the"),
        ]:
            assert "".join(stream_text(pieces, word, prompt)) == expected

    def test_special_tokens_are_invisible_and_do_not_split_characters(
        self, pieces, tokenizers_by_kind
    ):
        assert stream_text(pieces, [1, *byte_ids(pieces, b"\xc3"), 2, *byte_ids(pieces, b"\xa9")])[
            -2:
        ] == [
            "é",
            "",
        ]
        words = Tokenizer(tokenizers_by_kind["word_piece"])
        ids = [words.encode(word, add_special_tokens=False)[0] for word in ("cat", "[SEP]", "sat")]
        assert stream_text(words, ids) == ["cat", "", " sat", ""]

    def test_an_id_beyond_the_vocabulary_is_invisible(self, library):
        """Logits are padded, so such ids can be sampled."""
        tokenizer = Tokenizer(library)
        word = tokenizer.encode("a", add_special_tokens=False)[:1]
        assert "".join(stream_text(tokenizer, [*word, 1_000_000, *word])) == tokenizer.decode(
            word * 2
        )

    def test_a_word_decoder_emits_invalid_bytes_after_four(self, tokenizers_by_kind):
        words = Tokenizer(tokenizers_by_kind["metaspace_bytes"])
        stream = Detokenizer(words)
        out = [stream.feed(id) for id in byte_ids(words, b"\xff" * 6)]
        assert out == ["", "", "", "\ufffd" * 4, "", ""]
        assert stream.has_partial_character
        assert stream.flush() == "\ufffd" * 2

    @pytest.mark.no_cover
    def test_time_is_linear_in_invalid_bytes(self, pieces, tokenizers_by_kind):
        """The library's own stream is quadratic: 4000 bytes took two seconds."""
        for tokenizer in (pieces, Tokenizer(tokenizers_by_kind["metaspace_bytes"])):
            ids = byte_ids(tokenizer, b"\xff") * 4000
            assert len("".join(stream_text(tokenizer, ids))) == 4000
            half = count_lines(partial(stream_text, tokenizer, ids[:2000]))
            assert count_lines(partial(stream_text, tokenizer, ids)) < 2.1 * half

    @pytest.mark.parametrize("model", ["stories260K", "babyllama-361"])
    def test_continues_real_prompts_as_the_reference_does(self, shared, real_files, model):
        tokenizer = Tokenizer.load(real_files(f"models/{model}"))
        rows = (shared / f"models/{model}/anchors/greedy.jsonl").read_text().splitlines()
        assert rows
        for row in map(json.loads, rows):
            assert tokenizer.encode(row["prompt"], add_special_tokens=True) == row["prompt_ids"]
            completion = "".join(stream_text(tokenizer, row["completion_ids"], row["prompt_ids"]))
            assert row["prompt"] + completion == row["text_with_prompt"]


class TestVisibleTokens:
    @given(text=TEXTS, length=st.integers(0, 45))
    def test_counts_tokens_that_end_within_the_visible_text(
        self, byte_spelling_library, text, length
    ):
        tokenizer = Tokenizer(byte_spelling_library)
        prompt = tokenizer.encode("a", add_special_tokens=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "\ufffd" in tokenizer.decode(ids):
            return
        stream, visible = Detokenizer(tokenizer, prompt), VisibleTokens()
        for id in ids:
            piece = stream.feed(id)
            visible.feed(piece, has_partial_character=stream.has_partial_character)
        raw = [b"" if id in tokenizer.special_ids else tokenizer.token_bytes(id) for id in ids]
        shown = len(b"".join(raw).decode()[:length].encode())
        expected = sum(len(b"".join(raw[: n + 1])) <= shown for n in range(len(raw)))
        assert visible.count_within(length) == expected

    def test_a_stop_in_the_middle_of_a_token_excludes_it(self, bytewise):
        ids = bytewise.encode("xhe the!", add_special_tokens=False)
        assert [bytewise.token_text(id) for id in ids] == ["x", "he", " the", "!"]
        stream, stops, visible = Detokenizer(bytewise), StopFinder((" t",)), VisibleTokens()
        for id in ids:
            text = stream.feed(id)
            visible.feed(text, has_partial_character=stream.has_partial_character)
            if stops.feed(text).matched_stop is not None:
                break
        assert stops.released == len("xhe")
        assert visible.count_within(stops.released) == 2


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The reference: a search in the full text."""
    matches = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not matches:
        return text, None
    position, _, stop = min(matches)
    return text[:position], stop


class TestStopFinder:
    @given(text=FEW, stops=STOPS, data=st.data())
    def test_the_result_does_not_depend_on_chunk_boundaries(self, text, stops, data):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        finder, out, stop = StopFinder(stops), "", None
        expected = first_stop(text, stops)
        for chunk in chunks:
            result = finder.feed(chunk)
            out, stop = out + result.text, result.matched_stop
            assert expected[0].startswith(out)
            assert finder.released == len(out)
            if stop is not None:
                break
        else:
            result = finder.flush()
            out, stop = out + result.text, result.matched_stop
        assert (out, stop) == expected
        assert finder.released == len(out)

    @given(text=FEW, stops=STOPS)
    def test_holds_back_only_text_that_may_become_a_stop(self, text, stops):
        finder, fed = StopFinder(stops), ""
        for character in text:
            if finder.feed(character).matched_stop is not None:
                return
            fed += character
            held = fed[finder.released :]
            assert (
                held == ""
                or any(stop.startswith(held) for stop in stops)
                or any(stop in held for stop in stops)
            )
            assert not any(
                fed.endswith(stop[:n]) for stop in stops for n in range(len(held) + 1, len(stop))
            )

    def test_a_stop_may_span_any_number_of_tokens(self):
        finder = StopFinder(("###END",))
        out = [finder.feed(piece) for piece in ["a#", "##", "#E", "N", "D", "!"][:5]]
        assert [result.text for result in out] == ["a", "", "#", "", ""]
        assert [result.matched_stop for result in out] == [None] * 4 + ["###END"]

    def test_the_stop_that_starts_first_wins_even_if_it_ends_last(self):
        finder = StopFinder(("bcde", "d"))
        assert finder.feed("abcd").text == "a"
        assert finder.feed("e").matched_stop == "bcde"
        assert finder.released == 1

    def test_falls_back_to_a_complete_stop(self):
        finder = StopFinder(("bcde", "d"))
        assert finder.feed("abcd").matched_stop is None
        result = finder.feed("x")
        assert (result.text, result.matched_stop) == ("bc", "d")

    def test_flush_falls_back_to_a_complete_stop(self):
        finder = StopFinder(("bcde", "d"))
        assert finder.feed("abcd").text == "a"
        result = finder.flush()
        assert (result.text, result.matched_stop) == ("bc", "d")

    def test_the_shorter_of_two_stops_with_one_start_is_reported(self):
        assert StopFinder(("ab", "a")).feed("xab").matched_stop == "a"

    def test_the_shorter_stop_is_reported_even_if_the_longer_one_completes_later(self):
        result = StopFinder(("bcdyz", "d", "dy")).feed("abcdyx")
        assert (result.text, result.matched_stop) == ("abc", "d")

    def test_flush_emits_the_held_text(self):
        finder = StopFinder(("мир",))
        assert finder.feed("ми").text == ""
        assert finder.flush().text == "ми"
        assert finder.flush().text == ""

    def test_without_stops_everything_passes(self):
        finder = StopFinder(())
        assert finder.feed("text").text == "text"
        assert finder.released == 4

    @pytest.mark.no_cover
    def test_time_is_linear_in_a_stop_that_repeats_itself(self):
        finder = StopFinder(("a" * 2_000 + "b",))

        def feed_letters() -> None:
            for _ in range(2_000):
                assert finder.feed("a").matched_stop is None

        first, *others = (count_lines(feed_letters) for _ in range(3))
        assert max(others) < 2 * first
        assert finder.released == 4_000

    @pytest.mark.no_cover
    def test_the_cost_of_a_stop_is_bounded_by_the_text(self):
        """Sixteen stops of half a million characters each took five seconds before the first token,
        for every choice and on the event loop, which blocked all other requests."""
        stops = tuple("y" * 500_000 + str(position) for position in range(16))

        def feed_text() -> None:
            assert StopFinder(stops).feed("yes").text == "yes"

        assert count_lines(feed_text) < 5000
