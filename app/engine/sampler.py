"""Logits -> the next token, one row per sequence.

Knows: tensors and `Sampling`. Must not know: sequences, caches, what the tokens mean.

The order is Ollama's (x/mlxrunner/sample/sample.go of August 2026), one function a stage:

    logit bias → penalties → top_k → temperature → top_p → min_p → draw

Every array has one row per sequence and every stage works along a row, so a row cannot see its
neighbours. All randomness of a row comes from (its seed, how many tokens it has drawn): the same
request gives the same answer alone, in company, and whenever it is run. A stage that no row needs
is skipped; for a row that does not need it, it is the identity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.requests import Sampling

_MASK64 = (1 << 64) - 1

# below this a temperature divides logits out of float32's range; vLLM draws the line here too
_COLDEST = 1e-5


class RowState:
    """What sampling remembers of one sequence: its settings, its token counts, its draws.

    history: the ids that penalties look at, prompt included. The newest id may still be lazy (the
    loop is one step ahead of itself), which is why counts live in an array.
    """

    def __init__(self, sampling: Sampling, *, seed: int, prompt: Sequence[int], vocab: int) -> None:
        self.sampling = sampling
        self.draws = 0
        self._seed = seed
        self._vocab = vocab
        self.bias = _dense_bias(sampling.logit_bias, vocab) if sampling.logit_bias else None
        self.counts = self._first_counts(prompt) if self.penalised else None

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < _COLDEST

    @property
    def penalised(self) -> bool:
        s = self.sampling
        neutral = s.repetition_penalty == 1 and not s.presence_penalty and not s.frequency_penalty
        return not neutral and s.repeat_last_n != 0

    def saw(self, token: mx.array, history: Sequence[int]) -> None:
        """`token` ([] or [1], perhaps lazy) was sampled behind `history`, all of which is known."""
        if self.counts is None:
            return
        self.counts = self.counts.at[token.reshape(1)].add(1)
        last = self.sampling.repeat_last_n
        if 0 < last <= len(history):
            # window before: history[-last:]; the token pushes its first id out
            self.counts = self.counts.at[mx.array([history[-last]])].add(-1)

    def next_key(self) -> mx.array:
        """The key of the next draw: splitmix64's finaliser over seed and draw number
        (Steele, Lea, Flood 2014), as Ollama's runner does it."""
        self.draws += 1
        z = (self._seed + 0x9E3779B97F4A7C15 * self.draws) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        return mx.random.key(z ^ (z >> 31))

    def _first_counts(self, prompt: Sequence[int]) -> mx.array:
        last = self.sampling.repeat_last_n
        window = prompt if last < 0 else prompt[-last:]
        return mx.zeros((self._vocab,), mx.int32).at[mx.array(list(window))].add(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """tokens: [B] ids. logprobs: [B] natural logs, and top_ids, top_logprobs: [B, k] most likely
    first; None unless some row asked. Lazy until evaluated."""

    tokens: mx.array
    logprobs: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None


def sample(
    logits: mx.array, rows: Sequence[RowState], *, top_logprobs: int | None = None
) -> Sampled:
    """logits: [B, V], any float type. top_logprobs: the most that any row asked for, or None.

    Log-probabilities are of the raw logits, before any stage, in float32.
    """
    logits = logits.astype(mx.float32)
    shaped = logits
    for needed, stage in _STAGES:
        if any(needed(row) for row in rows):
            shaped = stage(shaped, rows)
    tokens = _draw(shaped, rows)
    if top_logprobs is None:
        return Sampled(tokens=tokens)
    return _with_logprobs(tokens, logits, top_logprobs)


def _with_logprobs(tokens: mx.array, logits: mx.array, count: int) -> Sampled:
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    if count == 0:
        return Sampled(tokens=tokens, logprobs=chosen)
    count = min(count, logits.shape[-1])
    top = mx.argpartition(-logprobs, count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(logprobs, top, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return Sampled(
        tokens=tokens,
        logprobs=chosen,
        top_ids=mx.take_along_axis(top, order, axis=-1),
        top_logprobs=mx.take_along_axis(values, order, axis=-1),
    )


def _column(rows: Sequence[RowState], field: Callable[[RowState], float]) -> mx.array:
    return mx.array([field(row) for row in rows], dtype=mx.float32)[:, None]


def _dense_bias(pairs: Sequence[tuple[int, float]], vocab: int) -> mx.array:
    ids, values = zip(*pairs, strict=True)
    return mx.zeros((vocab,)).at[mx.array(list(ids))].add(mx.array(list(values)))


def _bias(logits: mx.array, rows: Sequence[RowState]) -> mx.array:
    none = mx.zeros((logits.shape[-1],))
    return logits + mx.stack([none if row.bias is None else row.bias for row in rows])


def _penalties(logits: mx.array, rows: Sequence[RowState]) -> mx.array:
    """Repetition (Keskar et al. 2019) divides a positive logit and multiplies a negative one;
    presence is subtracted once per seen token, frequency once per sight (OpenAI)."""
    none = mx.zeros((logits.shape[-1],), mx.int32)
    counts = mx.stack([none if row.counts is None else row.counts for row in rows])
    seen = counts > 0
    repetition = _column(rows, lambda row: row.sampling.repetition_penalty)
    presence = _column(rows, lambda row: row.sampling.presence_penalty)
    frequency = _column(rows, lambda row: row.sampling.frequency_penalty)
    repeated = mx.where(logits < 0, logits * repetition, logits / repetition)
    return mx.where(seen, repeated - presence - frequency * counts, logits)


def _top_k(logits: mx.array, rows: Sequence[RowState]) -> mx.array:
    """Keep the k most likely tokens, and those that tie with the last of them."""
    vocab = logits.shape[-1]
    wanted = [min(row.sampling.top_k, vocab) for row in rows]
    best = -mx.sort(-mx.topk(logits, max(wanted), axis=-1), axis=-1)
    last = mx.take_along_axis(best, mx.array([[max(k, 1) - 1] for k in wanted]), axis=-1)
    off = mx.array([[k == 0] for k in wanted])
    return mx.where((logits >= last) | off, logits, -mx.inf)


def _temperature(logits: mx.array, rows: Sequence[RowState]) -> mx.array:
    """Greedy rows pass unchanged."""
    return logits / _column(rows, lambda row: 1.0 if row.greedy else row.sampling.temperature)


def _top_p(logits: mx.array, rows: Sequence[RowState]) -> mx.array:
    """Nucleus (Holtzman et al. 2020): the most likely tokens whose predecessors sum to less than
    p, so the one that crosses p stays, and at least one does."""
    p = _column(rows, lambda row: row.sampling.top_p)
    order = mx.argsort(-logits, axis=-1)
    ranked = mx.softmax(mx.take_along_axis(logits, order, axis=-1), axis=-1)
    before = mx.cumsum(ranked, axis=-1) - ranked
    first = mx.arange(logits.shape[-1])[None] == 0
    kept = (before < p) | first | (p >= 1)
    mask = mx.put_along_axis(mx.zeros_like(kept), order, kept, axis=-1)
    return mx.where(mask, logits, -mx.inf)


def _min_p(logits: mx.array, rows: Sequence[RowState]) -> mx.array:
    """Drop what is less likely than min_p times the most likely (Nguyen et al. 2024)."""
    least = mx.log(_column(rows, lambda row: row.sampling.min_p))  # log 0 = -inf drops nothing
    return mx.where(logits - mx.max(logits, axis=-1, keepdims=True) >= least, logits, -mx.inf)


def _draw(logits: mx.array, rows: Sequence[RowState]) -> mx.array:
    """Gumbel-max with one key a row; greedy rows take the maximum itself. [B, V] -> [B]."""
    if all(row.greedy for row in rows):
        return mx.argmax(logits, axis=-1)
    silent = mx.zeros((logits.shape[-1],))
    noise = mx.stack(
        [
            silent if row.greedy else mx.random.gumbel((logits.shape[-1],), key=row.next_key())
            for row in rows
        ]
    )
    return mx.argmax(logits + noise, axis=-1)


def _drawn_by(row: RowState, active: bool) -> bool:
    """Filters that keep the most likely token cannot change a greedy row."""
    return active and not row.greedy


_Needed = Callable[[RowState], bool]
_Stage = Callable[[mx.array, Sequence[RowState]], mx.array]

_STAGES: tuple[tuple[_Needed, _Stage], ...] = (
    (lambda row: row.bias is not None, _bias),
    (lambda row: row.counts is not None, _penalties),
    (lambda row: _drawn_by(row, row.sampling.top_k > 0), _top_k),
    (lambda row: _drawn_by(row, row.sampling.temperature != 1), _temperature),
    (lambda row: _drawn_by(row, row.sampling.top_p < 1), _top_p),
    (lambda row: _drawn_by(row, row.sampling.min_p > 0), _min_p),
)
