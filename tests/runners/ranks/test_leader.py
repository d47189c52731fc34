"""Rank 0 and its followers: rendezvous, lost ranks, and grammars of all ranks."""

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
    launch,
    send_hello,
)
from tests.waiting import wait_until


@pytest.fixture
def exit_delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays, in seconds, of attempted exits of the process."""
    delays: list[float] = []
    monkeypatch.setattr(leader, "_exit_after", delays.append)
    return delays


@pytest.fixture
def model(tiny_model: Path) -> ModelFiles:
    return files(tiny_model)


class PendingGroup:
    """Rank 0 while it waits for the others."""

    def __init__(self, ranks: FakeGroup, group: Future[RankGroup]) -> None:
        self.ranks = ranks
        self.group = group

    @property
    def rendezvous(self) -> RendezvousInfo:
        wait_until(lambda: self.ranks.data, limit=PATIENCE)
        return RendezvousInfo.decode(self.ranks.data)


@pytest.fixture
def pending_group(
    model: ModelFiles, exit_delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> Iterator[PendingGroup]:
    with ThreadPoolExecutor() as pool:
        ranks = FakeGroup()
        monkeypatch.setattr(leader, "join_rank_group", lambda _: ranks)
        yield PendingGroup(ranks, pool.submit(gather_ranks, launch(0), model, SETTINGS))


@pytest.fixture
def pair(
    pending_group: PendingGroup, model: ModelFiles
) -> Iterator[tuple[RankGroup, RankConnection]]:
    """Both ends of the connection to rank 1."""
    connection, reply = send_hello(pending_group.rendezvous, model)
    assert reply == HelloReply()
    group = pending_group.group.result(PATIENCE)
    yield group, connection
    group.stop_followers()
    connection.close()


def listen_for_failure(group: RankGroup) -> Callable[[], list[str]]:
    """Returns a function that waits for the failure, and gives its reasons."""
    reasons, event = list[str](), threading.Event()

    def add_reason(why: str) -> None:
        reasons.append(why)
        event.set()

    group.add_failure_listener(add_reason)

    def wait() -> list[str]:
        assert event.wait(PATIENCE)
        return reasons

    return wait


def test_a_connection_without_the_secret_is_closed(
    pending_group: PendingGroup, model: ModelFiles
) -> None:
    rendezvous = pending_group.rendezvous
    for secret in ("", "guessed"):
        with pytest.raises(AssertionError):  # closed without a reply
            send_hello(rendezvous, model, secret=secret)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"is":"RankFailed","reason":"x"}\n'):
        with socket.create_connection(("127.0.0.1", rendezvous.port), PATIENCE) as other:
            other.sendall(garbage)
    connection, reply = send_hello(rendezvous, model)
    assert reply == HelloReply()
    pending_group.group.result(PATIENCE).stop_followers()
    assert list(connection.read_from_leader()) == [Stop()]
    connection.close()


def test_a_rank_with_another_setting_is_refused_by_name(
    pending_group: PendingGroup, model: ModelFiles
) -> None:
    _, reply = send_hello(pending_group.rendezvous, model, parallel=3)
    assert reply.refused is not None
    assert "rank 1 (studio) has --parallel 3, but rank 0 has 2" in reply.refused
    with pytest.raises(AppError, match="--parallel"):
        pending_group.group.result(PATIENCE)


def test_a_rank_with_less_memory_is_accepted(
    pending_group: PendingGroup, model: ModelFiles
) -> None:
    connection, reply = send_hello(pending_group.rendezvous, model, memory=1 << 29)
    assert reply == HelloReply()
    pending_group.group.result(PATIENCE).stop_followers()
    connection.close()


def test_a_lost_rank_is_reported_by_name_and_once(
    pair: tuple[RankGroup, RankConnection], exit_delays: list[float]
) -> None:
    group, connection = pair
    wait = listen_for_failure(group)
    connection.shutdown()
    assert wait() == ["rank 1 (studio) disconnected: its process exited or is unreachable"]
    assert group.wait_for_failure() == wait()[0]
    group.fail("something else")
    assert len(wait()) == len(exit_delays) == 1
    # a later listener also gets the reason
    assert listen_for_failure(group)() == wait()


def test_a_failing_rank_reports_the_reason(
    pair: tuple[RankGroup, RankConnection], exit_delays: list[float]
) -> None:
    group, connection = pair
    wait = listen_for_failure(group)
    connection.send(RankFailed(reason="its disk is gone"))
    assert wait() == ["rank 1 (studio): its disk is gone"]
    assert len(exit_delays) == 1


def test_a_stopped_follower_is_not_reported_as_lost(
    pair: tuple[RankGroup, RankConnection], exit_delays: list[float]
) -> None:
    group, connection = pair
    group.stop_followers()
    assert list(connection.read_from_leader()) == [Stop()]
    connection.shutdown()
    # a shorter wait could only miss a failure
    assert group.wait_for_failure(timeout=0.2) is None
    assert exit_delays == []


def test_an_engine_is_attached_once(pair: tuple[RankGroup, RankConnection]) -> None:
    group, _ = pair
    group.attach_engine(lambda _: None)
    with pytest.raises(AppError, match="restart all ranks"):
        group.attach_engine(lambda _: None)


def test_a_grammar_is_ready_when_all_ranks_have_it(
    pair: tuple[RankGroup, RankConnection], model: ModelFiles
) -> None:
    group, connection = pair
    grammars = GrammarCompiler(model.tokenizer_path, vocab=model.vocab_size)
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(
            group.compile_grammar, grammars, Regex(pattern="a+"), frozenset({257})
        )
        message = next(connection.read_from_leader())
        assert isinstance(message, Compile)
        assert message.grammar == Regex(pattern="a+")
        assert message.stop_ids == {257}
        time.sleep(0.1)  # a shorter sleep could only miss that it ends
        assert not compiled.done()
        connection.send(Compiled(number=message.number))
        assert not compiled.result(PATIENCE).done


def test_a_slow_compilation_on_a_rank_fails_only_its_request(
    pair: tuple[RankGroup, RankConnection], model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, connection = pair
    monkeypatch.setattr(leader, "_COMPILE_TIMEOUT", 0.05)
    grammars = GrammarCompiler(model.tokenizer_path, vocab=model.vocab_size)
    with pytest.raises(
        AppError, match="the other ranks did not compile the grammar in time"
    ) as refused:
        group.compile_grammar(grammars, Regex(pattern="a+"), frozenset({257}))
    assert refused.value.kind is ErrorKind.BUSY
    message = next(connection.read_from_leader())
    assert isinstance(message, Compile)
    connection.send(Compiled(number=message.number))  # too late
    # a shorter wait could only miss a failure
    assert group.wait_for_failure(timeout=0.1) is None


def test_an_invalid_grammar_is_rejected(
    pair: tuple[RankGroup, RankConnection], model: ModelFiles
) -> None:
    group, _ = pair
    grammars = GrammarCompiler(model.tokenizer_path, vocab=model.vocab_size)
    with pytest.raises(AppError) as refused:
        group.compile_grammar(grammars, Regex(pattern="("), frozenset({257}))
    assert refused.value.kind is ErrorKind.INVALID
