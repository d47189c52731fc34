"""Inputs -> vectors: texts of which only pooled hidden states are wanted.

Knows: the model as a function, jobs of inputs, how much memory it is lent. Must not know:
sequences, sampling, who else runs. Jobs take turns, a piece each, and a piece is never larger than
a chunk of a prompt:

    short inputs, of any jobs   one forward pass [B, L], padded on the right
    a long input                a chunk of it, behind its layer caches; one such input at a time

Padding on the right changes nothing. Every layer looks backwards only, be it attention, whole or
windowed, a convolution or a recurrent state, and a mixture of experts treats each position by
itself, without a bound on how many an expert takes: so no position can know what stands behind it.
What the padding leaves in the layer caches goes with them.

The prefix cache is neither asked nor filled: it keeps what layers need to go on, and not the hidden
states behind the last one, of which vectors are made.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.embeddings import Embedded, EmbedJob
from app.engine.inputs import Lender, Long, Work
from app.engine.memory import Memory
from app.engine.pooling import pooled, told, unit, weights
from models.base import Model

log = logging.getLogger(__name__)

# inputs in one forward pass: each takes a whole step of positions (models/kv.py) in every layer's
# cache, however short it is
MOST_ROWS = 16

# layers whose caches exist at the same time where nobody holds on to them: one is read while the
# next one is made
_LAYERS_ALIVE = 2

_FAILED = "the engine failed while processing this request"
_UNSOUND = (
    "the model produced NaN or infinite hidden states: its weights or its "
    "quantization may be corrupt"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What the device works on. inputs: jobs and numbers of their inputs, whose vectors [B, D] it
    gives; None where it is of a long input that is not at its end. tokens: without padding. state:
    all that must be evaluated."""

    inputs: Sequence[tuple[Work, int]]
    tokens: int
    vectors: mx.array | None
    state: Sequence[mx.array]


class Embedder:
    """chunk: tokens of a piece, padding included.

    starving: whether it waits for memory, and nobody else should get any first. tokens: evaluated
    since the start, without padding. faults: times that something raised.
    """

    def __init__(self, model: Model, memory: Memory, lender: Lender, *, chunk: int) -> None:
        self.starving = False
        self.tokens = 0
        self.faults = 0
        self._model = model
        self._memory = memory
        self._lender = lender
        self._chunk = chunk
        self._layers = len(model.make_kv())
        self._works: deque[Work] = deque()  # whose turn it is, first
        self._long: Long | None = None
        self._piece: _Piece | None = None
        self._passing = 0  # bytes that are lent for the piece alone
        self._ended: list[Embedded] = []

    @property
    def idle(self) -> bool:
        return not (self._works or self._piece or self._ended)

    @property
    def jobs(self) -> int:
        return len(self._works)

    def submit(self, job: EmbedJob) -> None:
        self._works.append(Work(job))

    def cancel(self, job: str) -> None:
        """Forget a job; unknown ones have ended already. A piece of it that the device works on is
        waited for, and that is all."""
        for work in [work for work in self._works if work.job.id == job]:
            self._leave(work)

    def told(self) -> tuple[Embedded, ...]:
        """The jobs that ended since this was asked last."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def dispatch(self) -> bool:
        """Give the device the next piece. False where there is nothing to do, or no memory to do it
        in."""
        assert self._piece is None, "one piece at a time"
        self.starving = False
        for _ in range(len(self._works)):
            work = self._works[0]
            self._works.rotate(-1)
            if inputs := self._chosen(work):
                self._give(inputs)
                return True
            if self.starving:
                return False
        return False

    def collect(self) -> None:
        """Wait for the piece that was dispatched."""
        piece, self._piece = self._piece, None
        if piece is None:
            return
        try:
            mx.eval(piece.state)
            self._note(piece)
        except Exception:
            log.exception("embedding step failed")
            self._blame(piece.inputs)
        self._let_pass()

    def make_way(self) -> None:
        """Between two pieces. A long input whose memory was called back begins again later."""
        long = self._long
        if long is not None and self._lender.lent < long.lent:
            assert self._piece is None, "the device still writes into its layer caches"
            log.info("restarting an embedding input of %d tokens: out of KV memory", len(long.ids))
            long.work.waiting.appendleft(long.number)
            self._long = None

    # pieces

    def _chosen(self, work: Work) -> Sequence[tuple[Work, int]]:
        """What the work's turn is for; nothing where it has to wait."""
        if self._long is not None and self._long.work is work:
            return [(work, self._long.number)]
        if not work.waiting:
            return []
        if work.next_length <= self._chunk:
            return self._short(work)
        if self._long is not None:
            return []
        room = self._memory.footprint(work.next_length)
        if not self._lent(room):
            return []
        self._long = Long(work, work.waiting.popleft(), self._model.make_kv(), room)
        return [(work, self._long.number)]

    def _short(self, first: Work) -> Sequence[tuple[Work, int]]:
        """Short inputs of this work, and of others as far as there is room beside them."""
        chosen, width = list[tuple[Work, int]](), 0
        others = () if first.alone else (w for w in self._works if w is not first and not w.alone)
        for work in (first, *others):
            while work.waiting:
                rows, wider = len(chosen) + 1, max(width, work.next_length)
                if rows > 1 and (rows > MOST_ROWS or rows * wider > self._chunk):
                    break
                more = self._bytes(wider, rows) - self._passing
                if not (self._lender.lend(more) if chosen else self._lent(more)):
                    return chosen
                self._passing += more
                chosen.append((work, work.waiting.popleft()))
                width = wider
        return chosen

    def _bytes(self, width: int, rows: int) -> int:
        """Of layer caches that go as soon as the next layer has been evaluated."""
        alive = min(_LAYERS_ALIVE, self._layers)
        return rows * self._memory.footprint(width) * alive // self._layers

    def _lent(self, count: int) -> bool:
        self.starving = not self._lender.lend(count)
        return not self.starving

    def _let_pass(self) -> None:
        self._lender.take_back(self._passing)
        self._passing = 0

    def _give(self, inputs: Sequence[tuple[Work, int]]) -> None:
        long = self._long
        try:
            going_on = long is not None and inputs[0] == (long.work, long.number)
            piece = self._advanced(long) if long and going_on else self._whole(inputs)
            mx.async_eval(piece.state)
            self._piece = piece
        except Exception:
            log.exception("embedding step failed")
            self._blame(inputs)
            self._let_pass()

    def _whole(self, inputs: Sequence[tuple[Work, int]]) -> _Piece:
        rows = [work.job.inputs[number] for work, number in inputs]
        width = max(map(len, rows))
        tokens = mx.array([(*ids, *[0] * (width - len(ids))) for ids in rows])
        shares = [
            weights(work.job.pooling, len(ids), 0, width)
            for (work, _), ids in zip(inputs, rows, strict=True)
        ]
        # nobody holds on to the layer caches, so that each goes when its layer is done
        found = pooled(self._model(tokens, self._model.make_kv()), mx.array(shares))
        vectors = unit(found, [work.job.dimensions for work, _ in inputs])
        count = sum(map(len, rows))
        return _Piece(inputs=inputs, tokens=count, vectors=vectors, state=[vectors])

    def _advanced(self, long: Long) -> _Piece:
        job, length = long.work.job, len(long.ids)
        count = min(self._chunk, length - long.done)
        shares = weights(job.pooling, length, long.done, count)
        tokens = mx.array([long.ids[long.done : long.done + count]])
        found = pooled(self._model(tokens, long.kv), mx.array([shares]))
        long.total = found if long.total is None else long.total + found
        long.done += count
        vectors = unit(long.total, [job.dimensions]) if long.done == length else None
        caches = [array for layer in long.kv for array in layer.state()]
        state = [long.total, *caches] if vectors is None else [vectors]
        inputs = [(long.work, long.number)]
        return _Piece(inputs=inputs, tokens=count, vectors=vectors, state=state)

    # ends

    def _note(self, piece: _Piece) -> None:
        self.tokens += piece.tokens
        for work, _ in piece.inputs:
            work.alone = False
        if piece.vectors is None:
            return
        found = told(piece.vectors, [work.job.dimensions for work, _ in piece.inputs])
        for (work, number), vector in zip(piece.inputs, found, strict=True):
            if self._long is not None and self._long.work is work and self._long.number == number:
                self._drop_long()
            if work not in self._works:  # cancelled, or lost by another input of its own
                continue
            if vector is None:
                self._end(work, error=_UNSOUND)
                continue
            work.vectors[number] = vector
            if len(work.vectors) == len(work.job.inputs):
                self._end(work)

    def _blame(self, inputs: Sequence[tuple[Work, int]]) -> None:
        """One of these failed. If they are of one job, it ends; if of several, these begin again,
        each for itself."""
        self.faults += 1
        works = {work for work, _ in inputs}
        if len(works) == 1:
            for work in works & set(self._works):
                self._end(work, error=_FAILED)
            return
        for work, number in reversed(inputs):
            work.alone = True
            work.waiting.appendleft(number)

    def _end(self, work: Work, *, error: str | None = None) -> None:
        self._leave(work)
        vectors = () if error else tuple(work.vectors[i] for i in range(len(work.job.inputs)))
        self._ended.append(Embedded(job=work.job.id, vectors=vectors, error=error))

    def _leave(self, work: Work) -> None:
        self._works.remove(work)
        self.starving = False  # if another one is, it says so at its turn
        if self._long is not None and self._long.work is work:
            self._drop_long()

    def _drop_long(self) -> None:
        assert self._long is not None
        self._lender.take_back(self._long.lent)
        self._long = None
