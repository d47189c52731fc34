"""Plans the rounds of prompt chunks of a step, and measures the pace of steps.

Knows: numbers of tokens and sequences, the clock, the policy. Must not know: the model, token IDs.

A round is about one chunk's worth of prompt tokens. The clock decides how many rounds a step takes.
It has no effect on the position at which a chunk begins.
"""

from collections.abc import Callable, Sequence

from app.engine.policy import (
    MIN_RUNNING,
    PendingPrompt,
    SchedulerLimits,
    choose_aligned_round,
    count_prefill_rounds,
    split_prefill_budget,
    update_pace,
)


class StepPacing:
    """The pace of one engine loop. clock: returns the time in seconds.

    seconds_per_row: the duration of a decode step without other work, per sequence. None before it
        was measured.
    decode_seconds: the duration of a decode step without other work. None before it was measured.
    """

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self.seconds_per_row: float | None = None
        self.decode_seconds: float | None = None
        self._seconds_per_token: float | None = None
        self._turn = 0
        self._tokens = 0  # of this step
        self._began = 0.0

    def count_next(self) -> int:
        """Returns the number of rounds of the next step."""
        return count_prefill_rounds(self._seconds_per_token, self._limits)

    def plan(self, prompts: Sequence[PendingPrompt], *, pack: bool) -> list[tuple[int, int]]:
        """Returns the chunks of the next round, as indices into `prompts` and numbers of tokens.
        pack: whether chunks of several prompts can share a forward pass."""
        if self._limits.align_chunks:
            chosen = choose_aligned_round(prompts, self._limits, turn=self._turn, pack=pack)
            self._turn += bool(chosen)
            return chosen
        shares = split_prefill_budget([prompt.remaining for prompt in prompts], self._limits)
        return [(i, share) for i, share in enumerate(shares) if share]

    def add_tokens(self, count: int) -> None:
        """Counts the tokens of a chunk that is part of this step."""
        self._tokens += count

    def start_step(self) -> None:
        self._began, self._tokens = self._clock(), 0

    def end_step(self, *, rows: int) -> None:
        """Measures the pace. The device has computed the chunks. rows: the number of sequences that
        were decoded; 0 if the step computed embeddings or a part of an image."""
        seconds = self._clock() - self._began
        self._seconds_per_token = update_pace(
            self._seconds_per_token, count=self._tokens, seconds=seconds
        )
        if self._tokens or not rows:
            return
        self.decode_seconds = update_pace(self.decode_seconds, count=1, seconds=seconds)
        # Fewer rows take almost as long, because each step reads all weights.
        if rows >= MIN_RUNNING:
            self.seconds_per_row = update_pace(self.seconds_per_row, count=rows, seconds=seconds)
