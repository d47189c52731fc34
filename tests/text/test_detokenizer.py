"""However ids and texts are cut: the same text, whole characters, no more held than must be."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.text.detokenizer import Detokenizer, StopFinder, VisibleTokens
from app.text.tokenizer import Tokenizer

PLACES = st.lists(st.floats(0, 1, exclude_max=True), max_size=40)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Few letters, so that stop strings occur, overlap, and begin without ending.
FEW = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


def ids_at(tokenizer: Tokenizer, places: list[float]) -> list[int]:
    return [int(place * tokenizer.vocab_size) for place in places]


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = Detokenizer(tokenizer, prompt or [])
    return [*map(stream.feed, ids), stream.flush()]


def byte_ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text)
    return [id for id in ids if id is not None]


class TestDetokenizer:
    @given(places=PLACES)
    def test_any_ids_come_out_as_decoded_at_once(self, library, places):
        tokenizer = Tokenizer(library)
        ids = ids_at(tokenizer, places)
        whole = tokenizer.decode(ids)
        if tokenizer.byte_decoder is None and "\ufffd" in whole:
            return  # bad bytes under a decoder that takes good characters back: a test below
        assert "".join(streamed(tokenizer, ids)) == whole

    @given(text=TEXTS)
    def test_any_text_comes_out_as_decoded_at_once(self, library, text):
        tokenizer = Tokenizer(library)
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)

    @given(places=PLACES, start=PLACES)
    @example(places=[0.75, 0.5], start=[0.75, 0.5, 0.75, 0.5, 0.25])
    def test_continues_the_prompt(self, library, places, start):
        tokenizer = Tokenizer(library)
        ids, prompt = ids_at(tokenizer, places), ids_at(tokenizer, start)
        before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
        if before.endswith("\ufffd"):
            return  # it may end in half a character: the next tests
        if tokenizer.byte_decoder is None and "\ufffd" in whole:
            return
        assert before + "".join(streamed(tokenizer, ids, prompt)) == whole

    @given(text=TEXTS, cut=st.floats(0, 1))
    def test_never_shows_half_a_character(self, spelled, text, cut):
        """A text that is whole in the end shows no U+FFFD of ours on the way, wherever in it the
        prompt ended; the character that is cut there appears whole."""
        tokenizer = Tokenizer(spelled)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "\ufffd" in tokenizer.decode(ids):
            return  # it was in the text, or the vocabulary has no token for a byte, as Falcon's
        place = int(cut * len(ids))
        out = "".join(streamed(tokenizer, ids[place:], ids[:place]))
        assert "\ufffd" not in out
        assert tokenizer.decode(ids).endswith(out)

    def test_a_character_begun_by_the_prompt_appears_whole(self, pieces, made):
        words = Tokenizer(made["metaspace_bytes"])
        for tokenizer in (pieces, words):
            prompt, ids = byte_ids(tokenizer, b"\xe2\x82"), byte_ids(tokenizer, b"\xac")
            assert "".join(streamed(tokenizer, ids, prompt)) == "€"

    def test_waits_for_whole_characters(self, bytewise):
        ids = bytewise.encode("🙂é", add_special_tokens=False)
        stream = Detokenizer(bytewise)
        given_out: list[tuple[str, bool]] = []
        for id in ids:
            text = stream.feed(id)
            given_out.append((text, stream.has_partial_character))
        assert given_out == [("", True), ("", True), ("🙂", False), ("é", False)]
        assert stream.flush() == ""

    def test_gives_out_what_never_became_a_character(self, pieces):
        stream = Detokenizer(pieces, [1, *pieces.encode("a", add_special_tokens=False)])
        assert [stream.feed(id) for id in byte_ids(pieces, b"\xf0\x9f")] == ["", ""]
        assert stream.feed(byte_ids(pieces, b"!")[0]) == "\ufffd!"
        assert [stream.feed(id) for id in byte_ids(pieces, b"\xf0\x9f")] == ["", ""]
        assert stream.flush() == "\ufffd"
        assert stream.flush() == ""

    def test_the_first_space_is_the_tokenizers_own_only_at_the_start(self, pieces):
        word = pieces.encode("the", add_special_tokens=False)
        for prompt, expected in [
            ([], "the"),
            ([1], "the"),
            ([1, *pieces.encode("a", add_special_tokens=False)], " the"),
            (pieces.encode("", add_special_tokens=False), "the"),
        ]:
            assert "".join(streamed(pieces, word, prompt)) == expected

    def test_special_tokens_show_nothing_and_part_nothing(self, pieces, made):
        assert streamed(pieces, [1, *byte_ids(pieces, b"\xc3"), 2, *byte_ids(pieces, b"\xa9")])[
            -2:
        ] == [
            "é",
            "",
        ]
        words = Tokenizer(made["word_piece"])
        ids = [words.encode(word, add_special_tokens=False)[0] for word in ("cat", "[SEP]", "sat")]
        assert streamed(words, ids) == ["cat", "", " sat", ""]

    def test_an_id_beyond_the_vocabulary_shows_nothing(self, library):
        """Models pad their logits, so such ids can be sampled."""
        tokenizer = Tokenizer(library)
        word = tokenizer.encode("a", add_special_tokens=False)[:1]
        assert "".join(streamed(tokenizer, [*word, 1_000_000, *word])) == tokenizer.decode(word * 2)

    def test_a_decoder_of_words_gives_bad_bytes_out_after_four(self, made):
        words = Tokenizer(made["metaspace_bytes"])
        stream = Detokenizer(words)
        out = [stream.feed(id) for id in byte_ids(words, b"\xff" * 6)]
        assert out == ["", "", "", "\ufffd" * 4, "", ""]
        assert stream.has_partial_character
        assert stream.flush() == "\ufffd" * 2

    def test_time_is_linear_in_bad_bytes(self, pieces, made):
        """The library's own stream needs n² (a minute for these)."""
        for tokenizer in (pieces, Tokenizer(made["metaspace_bytes"])):
            ids = byte_ids(tokenizer, b"\xff") * 20_000
            begun = time.perf_counter()
            assert len("".join(streamed(tokenizer, ids))) == 20_000
            assert time.perf_counter() - begun < 10

    @pytest.mark.parametrize("model", ["stories260K", "babyllama-361"])
    def test_continues_real_prompts_as_the_reference_does(self, shared, real_files, model):
        tokenizer = Tokenizer.load(real_files(f"models/{model}"))
        rows = (shared / f"models/{model}/anchors/greedy.jsonl").read_text().splitlines()
        assert rows
        for row in map(json.loads, rows):
            assert tokenizer.encode(row["prompt"], add_special_tokens=True) == row["prompt_ids"]
            completion = "".join(streamed(tokenizer, row["completion_ids"], row["prompt_ids"]))
            assert row["prompt"] + completion == row["text_with_prompt"]


class TestVisibleTokens:
    @given(text=TEXTS, length=st.integers(0, 45))
    def test_counts_tokens_that_end_within_what_was_shown(self, spelled, text, length):
        tokenizer = Tokenizer(spelled)
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
    """The definition, looked up in the whole text."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    place, _, stop = min(found)
    return text[:place], stop


class TestStopFinder:
    @given(text=FEW, stops=STOPS, data=st.data())
    def test_any_cut_of_the_text_gives_the_same(self, text, stops, data):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        finder, out, stop = StopFinder(stops), "", None
        expected = first_stop(text, stops)
        for chunk in chunks:
            found = finder.feed(chunk)
            out, stop = out + found.text, found.matched_stop
            assert expected[0].startswith(out)
            assert finder.released == len(out)
            if stop is not None:
                break
        else:
            found = finder.flush()
            out, stop = out + found.text, found.matched_stop
        assert (out, stop) == expected
        assert finder.released == len(out)

    @given(text=FEW, stops=STOPS)
    def test_holds_back_only_what_may_become_a_stop(self, text, stops):
        finder, read = StopFinder(stops), ""
        for character in text:
            if finder.feed(character).matched_stop is not None:
                return
            read += character
            held = read[finder.released :]
            assert (
                held == ""
                or any(stop.startswith(held) for stop in stops)
                or any(stop in held for stop in stops)
            )
            assert not any(
                read.endswith(stop[:n]) for stop in stops for n in range(len(held) + 1, len(stop))
            )

    def test_a_stop_may_span_any_number_of_tokens(self):
        finder = StopFinder(("###END",))
        out = [finder.feed(piece) for piece in ["a#", "##", "#E", "N", "D", "!"][:5]]
        assert [found.text for found in out] == ["a", "", "#", "", ""]
        assert [found.matched_stop for found in out] == [None] * 4 + ["###END"]

    def test_the_one_that_starts_first_wins_though_it_ends_last(self):
        finder = StopFinder(("bcde", "d"))
        assert finder.feed("abcd").text == "a"
        assert finder.feed("e").matched_stop == "bcde"
        assert finder.released == 1

    def test_falls_back_to_the_one_that_is_there(self):
        finder = StopFinder(("bcde", "d"))
        assert finder.feed("abcd").matched_stop is None
        found = finder.feed("x")
        assert (found.text, found.matched_stop) == ("bc", "d")

    def test_the_end_decides_for_the_one_that_is_there(self):
        finder = StopFinder(("bcde", "d"))
        assert finder.feed("abcd").text == "a"
        found = finder.flush()
        assert (found.text, found.matched_stop) == ("bc", "d")

    def test_of_two_that_start_together_the_shorter_is_told(self):
        assert StopFinder(("ab", "a")).feed("xab").matched_stop == "a"

    def test_the_shorter_is_told_though_the_longer_came_during_the_wait(self):
        found = StopFinder(("bcdyz", "d", "dy")).feed("abcdyx")
        assert (found.text, found.matched_stop) == ("abc", "d")

    def test_gives_out_what_was_held_at_the_end(self):
        finder = StopFinder(("мир",))
        assert finder.feed("ми").text == ""
        assert finder.flush().text == "ми"
        assert finder.flush().text == ""

    def test_without_stops_everything_passes(self):
        finder = StopFinder(())
        assert finder.feed("text").text == "text"
        assert finder.released == 4

    def test_time_is_linear_in_a_stop_that_repeats_itself(self):
        finder = StopFinder(("a" * 2_000 + "b",))
        begun = time.perf_counter()
        for _ in range(20_000):
            assert finder.feed("a").matched_stop is None
        assert time.perf_counter() - begun < 10
        assert finder.released == 18_000

    def test_a_stop_costs_no_more_than_the_text_that_is_held_against_it(self):
        """Sixteen of half a million characters each took five seconds before the first token, for
        every choice anew and on the event loop: nobody else was answered meanwhile."""
        stop = "y" * 500_000
        begun = time.perf_counter()
        finder = StopFinder(tuple(stop + str(place) for place in range(16)))
        assert finder.feed("yes").text == "yes"
        assert time.perf_counter() - begun < 0.5
