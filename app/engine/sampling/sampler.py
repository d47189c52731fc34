"""Logits -> the next token, one row per sequence.

Knows: tensors, `SamplingParams`, what a row remembers. Must not know: sequences, caches, what the
tokens mean.

The order is Ollama's (x/mlxrunner/sample/sample.go of August 2026):

    logit bias → penalties → top_k → temperature → top_p → min_p → draw
    └──────── here, row by row of [B, V] ────────┘ └── app/engine/sampling/draw.py ──┘

What forbids ids comes between the two, so that nothing can lift it: the ends of a row that has not
drawn enough yet, then a grammar's mask.

All randomness of a row comes from (its seed, how many tokens it has drawn), and rows are computed
together only with rows that are computed alike (`_GroupKey`): the same request gives the same
answer alone, in company, and whenever it is run. No stage is run for rows that do not need it,
except where it is the identity for them.

What sampling remembers of one sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.requests import SamplingParams
from app.engine.sampling.draw import Draw, SamplingMethod, choose_method
from app.engine.sampling.logprobs import compute_logprobs


class SamplerState:
    """What sampling remembers of one sequence while no `MlxLmBatch` has it.

    seed: taken modulo 2^64. prompt: ids that penalties look at, besides those to be sampled.
    vocab: ids that may be sampled or biased, 0 to vocab - 1. stop_ids: those that are not drawn
    before min_tokens others were.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        vocab: int,
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.vocab = vocab
        self.num_drawn = 0
        self.stop_ids = sorted(id for id in stop_ids if id < vocab)
        self.min_tokens = min_tokens
        self.bias = _dense_bias(sampling.logit_bias, vocab) if sampling.logit_bias else None
        self.token_counts: mx.array | None = None  # [V] int32: how often each id is in sight
        self.window: mx.array | None = (
            None  # [up to repeat_last_n] ids in sight, see `_TokenCounts`
        )
        self.num_counted = 0  # ids that ever came in sight
        if _has_penalties(sampling):
            self._count_prompt_tokens(prompt)

    @property
    def min_tokens_left(self) -> int:
        """How many more it draws before one of its ends may come."""
        return max(0, self.min_tokens - self.num_drawn) if self.stop_ids else 0

    def _count_prompt_tokens(self, prompt: Sequence[int]) -> None:
        last = self.sampling.repeat_last_n
        seen = list(prompt if last < 0 else prompt[-last:])
        self.num_counted = len(seen)
        # a prompt may hold ids that cannot be sampled; they take their place in the window
        ids = mx.array([id for id in seen if id < self.vocab], dtype=mx.int32)
        self.token_counts = mx.zeros((self.vocab,), dtype=mx.int32).at[ids].add(1)
        if last > 0:
            self.window = mx.array(seen, dtype=mx.int32)


def _has_penalties(sampling: SamplingParams) -> bool:
    s = sampling
    neutral = s.repetition_penalty == 1 and not s.presence_penalty and not s.frequency_penalty
    return not neutral and s.repeat_last_n != 0


def _dense_bias(pairs: Sequence[tuple[int, float]], vocab: int) -> mx.array:
    ids, values = zip(*pairs, strict=True)
    return mx.zeros((vocab,)).at[mx.array(list(ids))].add(mx.array(list(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """tokens: [B] ids, uint32. valid: [B] bool; False where a token means nothing, because the
    row's logits hold NaN or +inf, or nothing finite that may be drawn. logprobs: [B] natural logs,
    and top_ids, top_logprobs: [B, k] most likely first; None unless asked for. Lazy until
    evaluated."""

    tokens: mx.array
    valid: mx.array
    logprobs: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None


def local_tokens(tokens: mx.array) -> mx.array:
    """What was drawn here counts."""
    return tokens


class SamplerBatch:
    """The rows that sample together, in this order, until one joins or leaves.

    broadcast_tokens: what was drawn -> what counts as drawn, both [b] uint32 and lazy; for those
    who sample the same rows elsewhere, and perhaps round otherwise."""

    def __init__(
        self,
        states: Sequence[SamplerState],
        broadcast_tokens: Callable[[mx.array], mx.array] = local_tokens,
    ) -> None:
        assert states, "nobody to sample for"
        self._vocab = states[0].vocab
        assert all(row.vocab == self._vocab for row in states), "rows of two models"
        kinds: dict[_GroupKey, list[int]] = {}
        for place, row in enumerate(states):
            kinds.setdefault(_group_key(row), []).append(place)
        self._groups = [
            (mx.array(places), _Group(kind, [states[place] for place in places], broadcast_tokens))
            for kind, places in kinds.items()
        ]
        grouped = [place for places in kinds.values() for place in places]
        self._order = mx.array(sorted(range(len(states)), key=grouped.__getitem__))
        self._num_draws = 0

    def sample(
        self,
        logits: mx.array,
        *,
        top_logprobs: int | None = None,
        allowed: mx.array | None = None,
    ) -> SamplerOutput:
        """Draw one token a row, and remember it for the next.

        logits: [B, V or more], any float type; what is beyond V pads the output layer and is cut
        off. top_logprobs: the most that any row asked for, or None. allowed: [B, V or more] bool,
        the ids that a row may draw.

        Log-probabilities are of the raw logits over V ids, before any stage, in float32.
        """
        assert self._groups, "released"
        raw = logits[:, : self._vocab].astype(mx.float32)
        # a maximum is NaN if anything is
        sound = mx.isfinite(mx.max(raw, axis=-1))
        if allowed is not None:
            allowed = allowed[:, : self._vocab]
            sound = sound & mx.any(allowed & (raw > -mx.inf), axis=-1)
        tokens = self._draw_tokens(raw, allowed)
        self._num_draws += 1
        if top_logprobs is None:
            return SamplerOutput(tokens=tokens, valid=sound)
        return _with_logprobs(tokens, sound, raw, top_logprobs)

    def release(self) -> None:
        """Hand what is remembered back to the rows. This object is dead afterwards."""
        for _, group in self._groups:
            group.release(self._num_draws)
        self._groups = []

    def _draw_tokens(self, raw: mx.array, allowed: mx.array | None) -> mx.array:
        if len(self._groups) == 1:
            return self._groups[0][1].draw(raw, allowed, self._num_draws)
        drawn = [
            group.draw(raw[places], None if allowed is None else allowed[places], self._num_draws)
            for places, group in self._groups
        ]
        return mx.concatenate(drawn)[self._order]


@dataclass(frozen=True, slots=True)
class _GroupKey:
    """What makes rows computed alike. All of it is a row's own affair."""

    method: SamplingMethod
    biased: bool
    penalised: bool
    windowed: bool
    has_min_tokens: bool


def _group_key(row: SamplerState) -> _GroupKey:
    return _GroupKey(
        method=choose_method(row.sampling, row.vocab),
        biased=row.bias is not None,
        penalised=row.token_counts is not None,
        windowed=row.window is not None,
        has_min_tokens=row.min_tokens_left > 0,
    )


class _Group:
    """Rows of one kind."""

    def __init__(
        self,
        kind: _GroupKey,
        rows: Sequence[SamplerState],
        broadcast_tokens: Callable[[mx.array], mx.array],
    ) -> None:
        self._rows = rows
        self._broadcast_tokens = broadcast_tokens
        samplings = [row.sampling for row in rows]
        biases = [row.bias for row in rows if row.bias is not None]
        self._bias = mx.stack(biases) if biases else None
        self._token_counts = _TokenCounts(rows) if kind.penalised else None
        self._min_tokens = _MinTokens(rows) if kind.has_min_tokens else None
        self._draw = Draw(
            kind.method,
            samplings,
            seeds=[row.seed for row in rows],
            num_drawn=[row.num_drawn for row in rows],
        )

    def draw(self, logits: mx.array, allowed: mx.array | None, step: int) -> mx.array:
        """[b, V] float32 -> [b] uint32. step: draws before this one."""
        if self._bias is not None:
            logits = logits + self._bias
        if self._token_counts is not None:
            logits = self._token_counts.penalise(logits)
        if self._min_tokens is not None:
            logits = self._min_tokens.mask_stop_ids(logits, step)
        if allowed is not None:
            logits = mx.where(allowed, logits, -mx.inf)
        tokens = self._broadcast_tokens(self._draw(logits, step))
        if self._token_counts is not None:
            self._token_counts.add(tokens, step)
        return tokens

    def release(self, num_draws: int) -> None:
        for row in self._rows:
            row.num_drawn += num_draws
        if self._token_counts is not None:
            self._token_counts.release(num_draws)


class _MinTokens:
    """The ids that end an answer, while it is too short to. Whether it is follows from how many
    were drawn, which is known before their values are."""

    def __init__(self, rows: Sequence[SamplerState]) -> None:
        vocab = rows[0].vocab
        self._stop_mask = mx.stack(
            [
                mx.zeros((vocab,), dtype=mx.bool_).at[mx.array(row.stop_ids)].add(True)
                for row in rows
            ]
        )
        self._tokens_left = mx.array([[row.min_tokens_left] for row in rows])
        self._longest = max(row.min_tokens_left for row in rows)

    def mask_stop_ids(self, logits: mx.array, step: int) -> mx.array:
        if step >= self._longest:
            return logits
        return mx.where(self._stop_mask & (step < self._tokens_left), -mx.inf, logits)


class _TokenCounts:
    """The ids that penalties see, counted; of rows that all have a window, or all have none.

    Tokens may still be lazy when they are added (the loop is one step ahead of itself), which is
    why counts and windows are arrays. A window of n is a ring: the i-th id that came in sight is at
    i mod n, and pushes out what is there from n on. It is only as long as it has been filled, for n
    may be larger than any context.
    """

    def __init__(self, rows: Sequence[SamplerState]) -> None:
        self._rows = rows
        self._counts = mx.stack([row.token_counts for row in rows if row.token_counts is not None])
        self._repetition = _column(rows, lambda s: s.repetition_penalty)
        self._presence = _column(rows, lambda s: s.presence_penalty)
        self._frequency = _column(rows, lambda s: s.frequency_penalty)
        self._numbers = mx.arange(len(rows))
        windows = [row.window for row in rows if row.window is not None]
        self._windows = _stack_padded(windows) if windows else None
        self._lengths = mx.array([row.sampling.repeat_last_n for row in rows])
        self._num_counted = mx.array([row.num_counted for row in rows])
        self._max_counted = max(row.num_counted for row in rows)
        self._longest = max(row.sampling.repeat_last_n for row in rows)

    def penalise(self, logits: mx.array) -> mx.array:
        """Repetition (Keskar et al. 2019) divides a positive logit and multiplies a negative one;
        presence is subtracted once per seen id, frequency once per sight (OpenAI)."""
        repeated = mx.maximum(logits, 0) / self._repetition
        repeated = repeated + mx.minimum(logits, 0) * self._repetition
        penalised = repeated - self._presence - self._frequency * self._counts
        return mx.where(self._counts > 0, penalised, logits)

    def add(self, tokens: mx.array, step: int) -> None:
        """tokens: [b], drawn in this turn, perhaps lazy."""
        self._counts = self._counts.at[self._numbers, tokens].add(1)
        if self._windows is None:
            return
        self._windows = self._grow_windows(self._windows, step)
        sighted = self._num_counted + step
        places = sighted % self._lengths
        pushed = self._windows[self._numbers, places]
        vocab = self._counts.shape[-1]
        leaves = (sighted >= self._lengths) & (pushed < vocab)
        pushed = mx.minimum(pushed, vocab - 1)
        self._counts = self._counts.at[self._numbers, pushed].add(-leaves.astype(mx.int32))
        self._windows[self._numbers, places] = tokens.astype(mx.int32)

    def release(self, num_draws: int) -> None:
        for number, row in enumerate(self._rows):
            row.num_counted += num_draws
            row.token_counts = self._counts[number]
            if self._windows is not None:
                filled = min(row.num_counted, row.sampling.repeat_last_n)
                row.window = self._windows[number, :filled]

    def _grow_windows(self, windows: mx.array, step: int) -> mx.array:
        filled = windows.shape[-1]
        needed = min(self._max_counted + step + 1, self._longest)
        if needed <= filled:
            return windows
        return mx.pad(windows, [(0, 0), (0, min(2 * needed, self._longest) - filled)])


def _stack_padded(windows: Sequence[mx.array]) -> mx.array:
    longest = max(map(len, windows))
    return mx.stack([mx.pad(window, (0, longest - len(window))) for window in windows])


def _column(rows: Sequence[SamplerState], field: Callable[[SamplingParams], float]) -> mx.array:
    return mx.array([[field(row.sampling)] for row in rows], dtype=mx.float32)


def _with_logprobs(
    tokens: mx.array, sound: mx.array, logits: mx.array, count: int
) -> SamplerOutput:
    chosen, ids, logprobs = compute_logprobs(logits, tokens, count)
    return SamplerOutput(
        tokens=tokens, valid=sound, logprobs=chosen, top_ids=ids, top_logprobs=logprobs
    )
