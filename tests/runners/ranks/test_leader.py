"""Rank 0 and those who work with it: who is let in, who is missed, what all wait for."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.requests import Regex
from app.grammar.compiler import GrammarCompiler
from app.runners.ranks import leader
from app.runners.ranks.leader import RankGroup, gather_ranks
from app.runners.ranks.protocol import (
    Compile,
    Compiled,
    HelloReply,
    RankConnection,
    RankFailed,
    Stop,
)
from app.runners.ranks.rendezvous import RendezvousInfo
from tests.runners.ranks.gathered import (
    PATIENCE,
    SETTINGS,
    FakeGroup,
    files,
    greeted,
    launch,
)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """In how many seconds the process would have been ended."""
    found: list[float] = []
    monkeypatch.setattr(leader, "_exit_after", found.append)
    return found


@pytest.fixture
def model(tiny_model: Path) -> ModelFiles:
    return files(tiny_model)


class Waiting:
    """Rank 0, while the others come."""

    def __init__(self, ranks: FakeGroup, group: Future[RankGroup]) -> None:
        self.ranks = ranks
        self.group = group

    @property
    def meeting(self) -> RendezvousInfo:
        deadline = time.monotonic() + PATIENCE
        while not self.ranks.words:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return RendezvousInfo.decode(self.ranks.words)


@pytest.fixture
def waiting(
    model: ModelFiles, ended: list[float], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Waiting]:
    with ThreadPoolExecutor() as pool:
        ranks = FakeGroup()
        monkeypatch.setattr(leader, "join_rank_group", lambda _: ranks)
        yield Waiting(ranks, pool.submit(gather_ranks, launch(0), model, SETTINGS))


@pytest.fixture
def pair(waiting: Waiting, model: ModelFiles) -> Iterator[tuple[RankGroup, RankConnection]]:
    """Both ends of the line to rank 1."""
    line, welcome = greeted(waiting.meeting, model)
    assert welcome == HelloReply()
    group = waiting.group.result(PATIENCE)
    yield group, line
    group.stop_followers()
    line.close()


def heard(group: RankGroup) -> Callable[[], list[str]]:
    """Why the group was lost, once it was."""
    told, event = list[str](), threading.Event()

    def hear(why: str) -> None:
        told.append(why)
        event.set()

    group.add_failure_listener(hear)

    def wait() -> list[str]:
        assert event.wait(PATIENCE)
        return told

    return wait


def test_whoever_does_not_know_the_secret_is_sent_away(waiting: Waiting, model: ModelFiles) -> None:
    meeting = waiting.meeting
    for secret in ("", "guessed"):
        with pytest.raises(AssertionError):  # the line ends without a word
            greeted(meeting, model, secret=secret)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"is":"RankFailed","reason":"x"}\n'):
        with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
            stranger.sendall(garbage)
    line, welcome = greeted(meeting, model)
    assert welcome == HelloReply()
    waiting.group.result(PATIENCE).stop_followers()
    assert list(line.read_from_leader()) == [Stop()]
    line.close()


def test_who_has_another_setting_is_refused_by_name(waiting: Waiting, model: ModelFiles) -> None:
    _, welcome = greeted(waiting.meeting, model, parallel=3)
    assert welcome.refused is not None
    assert "rank 1 (studio) has --parallel 3, and rank 0 has 2" in welcome.refused
    with pytest.raises(AppError, match="--parallel"):
        waiting.group.result(PATIENCE)


def test_less_memory_is_no_difference(waiting: Waiting, model: ModelFiles) -> None:
    line, welcome = greeted(waiting.meeting, model, memory=1 << 29)
    assert welcome == HelloReply()
    waiting.group.result(PATIENCE).stop_followers()
    line.close()


def test_a_rank_that_is_gone_is_missed_by_name_and_once(
    pair: tuple[RankGroup, RankConnection], ended: list[float]
) -> None:
    group, line = pair
    wait = heard(group)
    line.shutdown()
    assert wait() == ["rank 1 (studio) disconnected: its process exited or is unreachable"]
    assert group.wait_for_failure() == wait()[0]
    group.fail("something else")
    assert len(wait()) == len(ended) == 1
    # who asks later is told, too
    assert heard(group)() == wait()


def test_a_rank_that_gives_up_says_why(
    pair: tuple[RankGroup, RankConnection], ended: list[float]
) -> None:
    group, line = pair
    wait = heard(group)
    line.send_to_leader(RankFailed(reason="its disk is gone"))
    assert wait() == ["rank 1 (studio): its disk is gone"]
    assert len(ended) == 1


def test_who_was_dismissed_is_not_missed(
    pair: tuple[RankGroup, RankConnection], ended: list[float]
) -> None:
    group, line = pair
    group.stop_followers()
    assert list(line.read_from_leader()) == [Stop()]
    line.shutdown()
    assert group.wait_for_failure(timeout=0.2) is None
    assert ended == []


def test_a_model_is_loaded_once(pair: tuple[RankGroup, RankConnection]) -> None:
    group, _ = pair
    group.attach_engine(lambda _: None)
    with pytest.raises(AppError, match="restart all ranks"):
        group.attach_engine(lambda _: None)


def test_a_grammar_is_ready_when_all_have_it(
    pair: tuple[RankGroup, RankConnection], model: ModelFiles
) -> None:
    group, line = pair
    grammars = GrammarCompiler(model.tokenizer_path, vocab=model.vocab_size)
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(
            group.compile_grammar, grammars, Regex(pattern="a+"), frozenset({257})
        )
        asked = next(line.read_from_leader())
        assert isinstance(asked, Compile)
        assert asked.grammar == Regex(pattern="a+")
        assert asked.stop_ids == {257}
        time.sleep(0.1)
        assert not compiled.done()
        line.send_to_leader(Compiled(number=asked.number))
        assert not compiled.result(PATIENCE).done


def test_a_rank_that_takes_too_long_for_a_grammar_keeps_one_request(
    pair: tuple[RankGroup, RankConnection], model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, line = pair
    monkeypatch.setattr(leader, "_COMPILE_TIMEOUT", 0.05)
    grammars = GrammarCompiler(model.tokenizer_path, vocab=model.vocab_size)
    with pytest.raises(
        AppError, match="the other ranks did not compile the grammar in time"
    ) as refused:
        group.compile_grammar(grammars, Regex(pattern="a+"), frozenset({257}))
    assert refused.value.kind is ErrorKind.BUSY
    asked = next(line.read_from_leader())
    assert isinstance(asked, Compile)
    line.send_to_leader(Compiled(number=asked.number))  # nobody waits for it any more
    assert group.wait_for_failure(timeout=0.1) is None


def test_a_grammar_that_cannot_be_followed_is_refused_as_ever(
    pair: tuple[RankGroup, RankConnection], model: ModelFiles
) -> None:
    group, _ = pair
    grammars = GrammarCompiler(model.tokenizer_path, vocab=model.vocab_size)
    with pytest.raises(AppError) as refused:
        group.compile_grammar(grammars, Regex(pattern="("), frozenset({257}))
    assert refused.value.kind is ErrorKind.INVALID
