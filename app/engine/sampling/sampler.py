"""Samples the next token from logits, one row per sequence.

Knows: tensors, `SamplingParams`, the order of the stages. Must not know: sequences, caches, text,
the implementation of the stages.

The stages run in the same order as in Ollama (x/mlxrunner/sample/sample.go of August 2026):

    logit bias → penalties → top_k → temperature → top_p → min_p → draw
    └───────── STAGES, row by row of [B, V] ─────┘ └── app/engine/sampling/draw.py ──┘

Stages that mask tokens are applied between the two parts, so that no other stage can unmask these
tokens. These are the last three stages, followed by the grammar mask.

The random numbers of a row depend only on its seed and on the number of tokens that it has sampled.
Rows are computed together only if they use the same method (`_GroupKey`). The output of a request
is therefore reproducible, whether it is batched or not.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.sampling_params import SamplingParams
from app.engine.sampling.allowed_tokens import AllowedTokens
from app.engine.sampling.bad_words import BadWords
from app.engine.sampling.draw import Draw, SamplingMethod, select_method
from app.engine.sampling.logit_bias import LogitBias
from app.engine.sampling.logprobs import compute_logprobs
from app.engine.sampling.min_tokens import MinTokens
from app.engine.sampling.penalties import Penalties
from app.engine.sampling.stage import Stage, StageInput

# The stages, in the order in which they are applied to the logits.
STAGES: tuple[Stage, ...] = (LogitBias(), Penalties(), AllowedTokens(), BadWords(), MinTokens())


class SamplerState:
    """The sampling state of one sequence while it is not in a `SamplerBatch`.

    seed: the seed, taken modulo 2^64.
    prompt: the tokens that penalties count in addition to sampled tokens.
    vocab: the vocabulary size. Token IDs from 0 to vocab - 1 may be sampled or biased.
    stop_token_ids: the tokens that are masked until min_tokens tokens were sampled.
    stages: one state for each of `STAGES`.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        vocab: int,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        num_drawn: int = 0,
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.vocab = vocab
        self.num_drawn = num_drawn
        sequence = StageInput(
            sampling=sampling,
            prompt=prompt,
            vocab=vocab,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens - num_drawn,
            num_drawn=num_drawn,
        )
        self.stages = tuple(
            stage.create_state(sequence) if sequence.sets(stage.knobs) else None for stage in STAGES
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """The output of one sampling operation. All arrays are lazy.

    tokens: [B] token IDs, uint32.
    valid: [B] bool. False if the token is meaningless, because the row's logits contain NaN or
        +inf, or no finite logit that may be sampled.
    logprobs: [B] natural log probabilities; None unless requested.
    top_ids, top_logprobs: [B, k], most likely first; None unless requested.
    """

    tokens: mx.array
    valid: mx.array
    logprobs: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None


def local_tokens(tokens: mx.array) -> mx.array:
    """Returns the tokens sampled in this process. This is the default `broadcast_tokens`."""
    return tokens


class SamplerBatch:
    """The rows that are sampled together, in order. A batch is used until a row joins or leaves.

    `broadcast_tokens` maps the locally sampled tokens to the tokens to use, both as lazy uint32
    arrays of shape [b]. It is needed if several ranks sample the same rows, because their logits
    may be rounded differently.
    """

    def __init__(
        self,
        states: Sequence[SamplerState],
        broadcast_tokens: Callable[[mx.array], mx.array] = local_tokens,
    ) -> None:
        assert states, "the batch is empty"
        self._vocab = states[0].vocab
        assert all(row.vocab == self._vocab for row in states), "the vocabularies differ"
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
        """Samples one token per row and adds it to the state of the rows.

        logits: [B, V or more], any float type. Columns beyond V are padding and are ignored.
        top_logprobs: the maximum that any row requested, or None.
        allowed: [B, V or more] bool, the tokens that a row may sample.

        Log probabilities are computed in float32 from the raw logits of V tokens, before any stage.
        """
        assert self._groups, "the batch was released"
        raw = logits[:, : self._vocab].astype(mx.float32)
        # A maximum is NaN if any value is NaN.
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
        """Writes the state back to the rows. The batch must not be used afterwards."""
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
    """The group key of a row, which does not depend on other rows. Rows with equal keys are
    computed together. `stages` contains a key for each of `STAGES`, or None for a stage that is
    skipped."""

    method: SamplingMethod
    stages: tuple[Hashable, ...]


def _group_key(row: SamplerState) -> _GroupKey:
    return _GroupKey(
        method=select_method(row.sampling, row.vocab),
        stages=tuple(None if state is None else state.group_key for state in row.stages),
    )


class _Group:
    """The rows with one group key."""

    def __init__(
        self,
        key: _GroupKey,
        rows: Sequence[SamplerState],
        broadcast_tokens: Callable[[mx.array], mx.array],
    ) -> None:
        self._rows = rows
        self._broadcast_tokens = broadcast_tokens
        self._stages = [
            stage.create_batch([row.stages[place] for row in rows])
            for place, stage in enumerate(STAGES)
            if key.stages[place] is not None
        ]
        self._draw = Draw(
            key.method,
            [row.sampling for row in rows],
            seeds=[row.seed for row in rows],
            num_drawn=[row.num_drawn for row in rows],
        )

    def draw(self, logits: mx.array, allowed: mx.array | None, step: int) -> mx.array:
        """Samples one token per row, [b, V] float32 -> [b] uint32. `step` is the number of previous
        calls."""
        for stage in self._stages:
            logits = stage.apply(logits, step)
        if allowed is not None:
            logits = mx.where(allowed, logits, -mx.inf)
        tokens = self._broadcast_tokens(self._draw(logits, step))
        for stage in self._stages:
            stage.add(tokens, step)
        return tokens

    def release(self, num_draws: int) -> None:
        for row in self._rows:
            row.num_drawn += num_draws
        for stage in self._stages:
            stage.release(num_draws)


def _with_logprobs(
    tokens: mx.array, sound: mx.array, logits: mx.array, count: int
) -> SamplerOutput:
    chosen, ids, logprobs = compute_logprobs(logits, tokens, count)
    return SamplerOutput(
        tokens=tokens, valid=sound, logprobs=chosen, top_ids=ids, top_logprobs=logprobs
    )
