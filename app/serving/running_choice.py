"""One running choice of a request: the events of its updates, its timestamps and its end.

Knows: the updates of a job, app.text. Must not know: queues, tasks, how updates are read.
"""

from array import array
from contextlib import AsyncExitStack

from app.core.errors import AppError, ErrorKind
from app.core.events import (
    Finish,
    FinishReason,
    PrefillProgress,
    Timings,
    Usage,
)
from app.core.jobs import Ended, Job, Prefilled, Started, Token
from app.core.ports import Submission
from app.serving.prompt_jobs import PreparedChoice
from app.text.generated_turns import TurnRecorder
from app.text.output import ChoiceOutputProcessor, Delta


class RunningChoice:
    """The state of a running choice. stack: closing it exits the context of the submission.
    arrived: the monotonic time in ns at which the request arrived. recorder: records the output, if
    later prompts may contain it. max_time: the maximum number of seconds of output; None for no
    limit. ended: whether the output has ended. cut: whether it ended before the job did."""

    def __init__(
        self,
        prepared: PreparedChoice,
        submission: Submission,
        stack: AsyncExitStack,
        answer: ChoiceOutputProcessor,
        arrived: int,
        recorder: TurnRecorder | None,
        max_time: float | None,
    ) -> None:
        self.recorder = recorder
        self.prepared = prepared
        self.submission = submission
        self.stack = stack
        self.answer = answer
        self.clock = ChoiceTimer(arrived)
        self._max_time = max_time
        self.reason: FinishReason = "stop"
        self.stop_token_id: int | None = None
        self.ended = self.cut = False

    def feed(self, token: Token) -> list[Delta]:
        """Adds a token. Returns the deltas that may be sent now."""
        if self.prepared.discard_output:
            self.clock.first_token_ns = token.timestamp_ns
            return []
        self.clock.record_token(token.timestamp_ns)
        deltas = self.answer.feed(token)
        if self.recorder is not None:
            self.recorder.feed(token.id, deltas)
        if self.answer.stopped:
            self._cut_after(self.answer.visible_tokens)
        elif self._max_time is not None and self.clock.exceeds(self._max_time):
            self._cut_after(self.clock.num_tokens)
            self.reason = "length"
        return deltas

    def record_prefill(self, update: Started | Prefilled) -> PrefillProgress:
        if isinstance(update, Prefilled):
            return self._prefill_progress(update.computed_tokens)
        self.clock.started = update.timestamp_ns
        self.clock.cached_tokens = update.cached_tokens
        return self._prefill_progress(update.cached_tokens)

    def record_end(self, update: Ended) -> None:
        """Records the end of the job. Raises AppError if the job has failed."""
        if update.reason == "error":
            raise _job_error(self.prepared.job, update)
        assert update.reason != "cancelled", "no other code may cancel a job"
        self.clock.ended = update.timestamp_ns
        self.reason = update.reason
        if update.stop_token_id in self.prepared.stop_token_ids:
            self.stop_token_id = update.stop_token_id
        self.ended = True

    def flush(self) -> list[Delta]:
        """Ends the output. Returns the remaining deltas."""
        deltas = self.answer.flush(self.stop_token_id)
        is_model_end = self.reason == "stop" and self.stop_token_id is None
        if self.recorder is not None and is_model_end and not self.answer.stopped:
            self.recorder.finish(deltas)
        return deltas

    def build_finish(self) -> Finish:
        clock, answer, job = self.clock, self.answer, self.prepared.job
        reason: FinishReason = "stop" if answer.stopped else self.reason
        if self.prepared.discard_output:
            reason = "length"
        if reason == "stop" and answer.num_tool_calls:
            reason = "tool_calls"
        return Finish(
            choice=self.prepared.choice,
            prompt_index=self.prepared.prompt_index,
            reason=reason,
            usage=Usage(
                prompt_tokens=len(job.prompt_token_ids),
                completion_tokens=clock.num_tokens,
                cached_tokens=clock.cached_tokens,
                reasoning_tokens=answer.reasoning_tokens,
            ),
            timings=clock.build_timings(),
            stop_string=answer.matched_stop,
            stop_token_id=self.stop_token_id,
        )

    def _prefill_progress(self, computed_tokens: int) -> PrefillProgress:
        return PrefillProgress(
            prompt_index=self.prepared.prompt_index,
            computed_tokens=computed_tokens,
            total_tokens=len(self.prepared.job.prompt_token_ids),
        )

    def _cut_after(self, tokens: int) -> None:
        """Ends the output early. The client received the first `tokens` sampled tokens."""
        self.submission.limit_cached_tokens(tokens)
        self.ended = self.cut = True


class ChoiceTimer:
    """The timestamps of a choice, as monotonic times in ns, and its token counts."""

    def __init__(self, arrived: int) -> None:
        self.arrived = self.started = arrived
        self.first_token_ns: int | None = None
        self.ended = arrived
        self.cached_tokens = 0
        self.num_tokens = 0
        self.inter_token_ns = array("q")  # a list of ints would take five times the memory

    def record_token(self, at: int) -> None:
        self.num_tokens += 1
        if self.first_token_ns is None:
            self.first_token_ns = at
        else:
            self.inter_token_ns.append(at - self.ended)
        self.ended = at

    def exceeds(self, seconds: float) -> bool:
        """Returns whether at least `seconds` have passed between the first and the last token."""
        first = self.first_token_ns
        return first is not None and self.ended - first >= seconds * 1e9

    def build_timings(self) -> Timings:
        first = self.ended if self.first_token_ns is None else self.first_token_ns
        return Timings(
            prefill_ns=first - self.started,
            decode_ns=self.ended - first,
            total_ns=self.ended - self.arrived,
            inter_token_ns=tuple(self.inter_token_ns),
        )


def _job_error(job: Job, ended: Ended) -> AppError:
    message = ended.error or "the engine failed"
    if not ended.invalid_request:
        return AppError(ErrorKind.ENGINE, message)
    return AppError(ErrorKind.INVALID, message, param=job.grammar.param if job.grammar else None)
