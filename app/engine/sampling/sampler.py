"""Samples the next token from logits, one row per sequence.

Knows: tensors, `SamplingParams`, the order of the stages. Must not know: sequences, caches, text,
the implementation of the stages, how the operation of the kernels computes.

The stages run in the same order as in Ollama (x/mlxrunner/sample/sample.go of August 2026):

    logit bias → penalties → top_k → temperature → top_p → min_p → draw
    └───────── STAGES, row by row of [B, V] ─────┘ └── app/engine/sampling/draw.py ──┘

Stages that mask tokens are applied between the two parts, so that no other stage can unmask these
tokens. These are the last three stages, followed by the grammar mask.

On the CPU, one operation of the kernels does all of this (`FusedBatch`). There, only rows with a
stage that it does not include use MLX's operations. The operation draws the same tokens. Its sums
are rounded in a different order, so a token at the very edge of the nucleus may differ.

The random numbers of a row depend only on its seed and on the number of tokens that it has sampled.
With MLX's operations, rows are computed together only if they use the same method (`_GroupKey`).
The output of a request is therefore reproducible, whether it is batched or not.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.core.sampling_params import SamplingParams
from app.engine.sampling.draw import (
    Draw,
    SamplingMethod,
    is_greedy,
    log_min_p,
    seed_words,
    select_method,
    top_p_bound,
)
from app.engine.sampling.logprobs import compute_logprobs
from app.engine.sampling.stages import (
    STAGES,
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
    Stage,
    StageInput,
    StageState,
)
from models import kernels

# The stages that the operation of the kernels includes. It applies them in the order of `STAGES`.
_FUSED_STAGES = (LogitBias, Penalties, AllowedTokens, BadWords, MinTokens)

# The initial number of tokens in the buffer of a `FusedBatch`.
_INITIAL_CAPACITY = 32


def can_fuse(stages: Iterable[Stage]) -> bool:
    """Returns whether the operation exists on this device and includes these stages."""
    return kernels.ops() is not None and all(isinstance(stage, _FUSED_STAGES) for stage in stages)


class FusedState:
    """The sampling state of one sequence while it is not in a `FusedBatch`. Penalties and bad words
    need the tokens of a row, the last of which may still be lazy. The kernel therefore gets them as
    arrays, and counts them again in each step.

    row: the settings for the operation.
    num_drawn: the number of tokens sampled since this object was created.
    drawn: these tokens, [num_drawn] uint32; empty if the operation does not need them.
    """

    def __init__(self, sequence: StageInput, seed: int) -> None:
        sampling, vocab = sequence.sampling, sequence.vocab
        penalized = sequence.sets(Penalties.knobs) and sampling.repeat_last_n != 0
        words = [word for word in sampling.bad_words if max(word) < vocab]
        allowed = [id for id in sampling.allowed_token_ids if id < vocab]
        self.row = kernels.ops().SampleRow(
            vocab=vocab,
            temperature=0.0 if is_greedy(sampling) else sampling.temperature,
            top_k=sampling.top_k,
            top_p=top_p_bound(sampling),
            min_p=log_min_p(sampling),
            seed_words=seed_words(seed),
            num_drawn=sequence.num_drawn,
            known=list(sequence.prompt) if penalized or words else [],
            output_begin=max(0, len(sequence.prompt) - sequence.num_drawn),
            bias=[(id, value) for id, value in sampling.logit_bias if id < vocab],
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            penalty_window=sampling.repeat_last_n,
            allowed_tokens=allowed or None,
            bad_words=words,
            stop_tokens=[id for id in sequence.stop_token_ids if id < vocab],
            min_tokens=sequence.min_tokens,
        )
        self.num_drawn = 0
        self.drawn = mx.zeros((0,), dtype=mx.uint32)


class FusedBatch:
    """The rows that are sampled in one operation. `broadcast_tokens`: see `SamplerBatch`."""

    def __init__(
        self, states: Sequence[FusedState], broadcast_tokens: Callable[[mx.array], mx.array]
    ) -> None:
        self._states = states
        self._broadcast_tokens = broadcast_tokens
        self._rows = [state.row for state in states]
        self._num_earlier = [state.num_drawn for state in states]
        searched = [state for state in states if state.row.uses_history]
        self._earlier = mx.concatenate([state.drawn for state in searched]) if searched else None
        # [steps or more, rows], the tokens sampled in this batch
        self._recent = (
            mx.zeros((_INITIAL_CAPACITY, len(states)), dtype=mx.uint32) if searched else None
        )

    def draw(
        self, logits: mx.array, bitmask: mx.array | None, step: int
    ) -> tuple[mx.array, mx.array]:
        """Samples one token per row. Returns the tokens and whether they are valid; see
        `SamplerOutput`."""
        tokens, valid = kernels.ops().sample(
            logits, self._rows, self._num_earlier, step, self._earlier, self._recent, bitmask
        )
        tokens = self._broadcast_tokens(tokens)
        if self._recent is not None:
            if step == len(self._recent):
                self._recent = mx.pad(self._recent, [(0, step), (0, 0)])
            self._recent[step] = tokens
        return tokens, valid

    def release(self, num_draws: int) -> None:
        for row, state in enumerate(self._states):
            state.num_drawn += num_draws
            if self._recent is not None and state.row.uses_history:
                state.drawn = mx.concatenate([state.drawn, self._recent[:num_draws, row]])


class SamplerState:
    """The sampling state of one sequence while it is not in a `SamplerBatch`.

    seed: the seed, taken modulo 2^64.
    prompt: the tokens that penalties count in addition to sampled tokens.
    vocab: the vocabulary size. Token IDs from 0 to vocab - 1 may be sampled or biased.
    stop_token_ids: the tokens that are masked until min_tokens tokens were sampled.
    fused: the state for the operation that includes all stages; None if it is not used.
    stages: otherwise, one state for each of `STAGES`.
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
        used = [stage for stage in STAGES if sequence.sets(stage.knobs)]
        self.fused: FusedState | None = None
        self.stages: tuple[StageState | None, ...] = ()
        if can_fuse(used):
            self.fused = FusedState(sequence, seed)
        else:
            self.stages = tuple(
                stage.create_state(sequence) if stage in used else None for stage in STAGES
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
        places_by_key: dict[_GroupKey | None, list[int]] = {}
        for place, row in enumerate(states):
            places_by_key.setdefault(_group_key(row), []).append(place)
        self._states = states
        self._groups = [
            (mx.array(places), _create_group([states[place] for place in places], broadcast_tokens))
            for places in places_by_key.values()
        ]
        grouped = [place for places in places_by_key.values() for place in places]
        self._order = mx.array(sorted(range(len(states)), key=grouped.__getitem__))
        self._num_draws = 0

    def sample(
        self,
        logits: mx.array,
        *,
        top_logprobs: int | None = None,
        bitmask: mx.array | None = None,
    ) -> SamplerOutput:
        """Samples one token per row and adds it to the state of the rows.

        logits: [B, V or more], any float type. Columns beyond V are padding and are ignored.
        top_logprobs: the maximum that any row requested, or None.
        bitmask: [B, V / 32 or more] uint32, a bit for each token that a row may sample; the lowest
            bit of a word is its first token.

        Log probabilities are computed in float32 from the raw logits of V tokens, before any stage.
        """
        assert self._groups, "the batch was released"
        raw = logits[:, : self._vocab].astype(mx.float32)
        tokens, valid = self._draw_tokens(raw, bitmask)
        self._num_draws += 1
        if top_logprobs is None:
            return SamplerOutput(tokens=tokens, valid=valid)
        chosen, ids, logprobs = compute_logprobs(raw, tokens, top_logprobs)
        return SamplerOutput(
            tokens=tokens, valid=valid, logprobs=chosen, top_ids=ids, top_logprobs=logprobs
        )

    def release(self) -> None:
        """Writes the state back to the rows. The batch must not be used afterwards."""
        for row in self._states:
            row.num_drawn += self._num_draws
        for _, group in self._groups:
            group.release(self._num_draws)
        self._groups = []

    def _draw_tokens(self, raw: mx.array, bitmask: mx.array | None) -> tuple[mx.array, mx.array]:
        if len(self._groups) == 1:
            return self._groups[0][1].draw(raw, bitmask, self._num_draws)
        drawn = [
            group.draw(raw[places], None if bitmask is None else bitmask[places], self._num_draws)
            for places, group in self._groups
        ]
        tokens, valid = (mx.concatenate(list(arrays)) for arrays in zip(*drawn, strict=True))
        return tokens[self._order], valid[self._order]


@dataclass(frozen=True, slots=True)
class _GroupKey:
    """The group key of a row, which does not depend on other rows. Rows with equal keys are
    computed together. `stages` contains a key for each of `STAGES`, or None for a stage that is
    skipped."""

    method: SamplingMethod
    stages: tuple[Hashable, ...]


def _group_key(row: SamplerState) -> _GroupKey | None:
    """Returns None for the group of the rows that one operation samples."""
    if row.fused is not None:
        return None
    return _GroupKey(
        method=select_method(row.sampling, row.vocab),
        stages=tuple(None if state is None else state.group_key for state in row.stages),
    )


def _create_group(
    rows: Sequence[SamplerState], broadcast_tokens: Callable[[mx.array], mx.array]
) -> "FusedBatch | _Group":
    fused = [row.fused for row in rows if row.fused is not None]
    return FusedBatch(fused, broadcast_tokens) if fused else _Group(rows, broadcast_tokens)


class _Group:
    """The rows with one group key, which use MLX's operations."""

    def __init__(
        self, rows: Sequence[SamplerState], broadcast_tokens: Callable[[mx.array], mx.array]
    ) -> None:
        self._broadcast_tokens = broadcast_tokens
        states = [row.stages for row in rows]
        self._stages = [
            stage.create_batch([row[place] for row in states])
            for place, stage in enumerate(STAGES)
            if (first := states[0][place]) is not None and first.group_key is not None
        ]
        self._draw = Draw(
            select_method(rows[0].sampling, rows[0].vocab),
            [row.sampling for row in rows],
            seeds=[row.seed for row in rows],
            num_drawn=[row.num_drawn for row in rows],
        )

    def draw(self, raw: mx.array, bitmask: mx.array | None, step: int) -> tuple[mx.array, mx.array]:
        """Samples one token per row of the logits [b, V] float32. `step` is the number of previous
        calls. Returns the tokens and whether they are valid."""
        # A maximum is NaN if any value is NaN.
        valid = mx.isfinite(mx.max(raw, axis=-1))
        logits = raw
        for stage in self._stages:
            logits = stage.apply(logits, step)
        if bitmask is not None:
            allowed = _expand_bits(bitmask)[:, : raw.shape[-1]]
            valid = valid & mx.any(allowed & (raw > -mx.inf), axis=-1)
            logits = mx.where(allowed, logits, -mx.inf)
        tokens = self._broadcast_tokens(self._draw(logits, step))
        for stage in self._stages:
            stage.add(tokens, step)
        return tokens, valid

    def release(self, num_draws: int) -> None:
        for stage in self._stages:
            stage.release(num_draws)


def _expand_bits(bitmask: mx.array) -> mx.array:
    """Expands words [b, n] to bool [b, 32 n]."""
    bits = (bitmask[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return bits.reshape(len(bitmask), -1) != 0
