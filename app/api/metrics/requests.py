"""What is counted of requests as they go by, model by model.

Knows: what the events of an answer say of its life. Must not know: names of families, how answers
are made.

The meanings are vLLM's (vllm/v1/metrics/stats.py): a request for n choices is n requests of the
engine, each of which is counted and timed when it finishes; the time to the first token is taken
when that is there, whatever comes after it. Waiting ends with the start in the engine, prefill with
the first token, decode with the last one; inference is both. Ours differ in two points: tokenizing
counts as waiting, and the end-of-sequence token as none.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from app.api.metrics.families import Ending, Families, OfModel
from app.core.embeddings import Embeddings, EmbedRequest
from app.core.errors import AppError
from app.core.events import Event, Finish, FinishReason, Loading, Progress, Prompt
from app.core.requests import GenerateRequest
from app.core.watched import choices_of

# a call is no reason of its own at vLLM's engine
_ENDING: dict[FinishReason, Ending] = {"stop": "stop", "tool_calls": "stop", "length": "length"}


class RequestFigures:
    """served: the name under which the model of a request is told, "" for one that is not served:
    what a client made up is no label."""

    def __init__(self, registry: CollectorRegistry, served: Callable[[str], str]) -> None:
        self._families = Families(registry)
        self._served = served
        self._models: dict[str, OfModel] = {}

    def of(self, name: str) -> OfModel:
        """What is counted of a model that is served; from zero, if this is the first word of it."""
        if name not in self._models:
            self._models[name] = self._families.of(name)
        return self._models[name]

    def watch(self, request: GenerateRequest | EmbedRequest) -> "RequestWatch | EmbedWatch":
        model = self.of(self._served(request.model))
        if isinstance(request, EmbedRequest):
            return EmbedWatch(model)
        return RequestWatch(model, request)


class RequestWatch:
    """When one request did what for the first time (`app.core.watched.Watch`)."""

    def __init__(self, model: OfModel, request: GenerateRequest) -> None:
        self._model = model
        # an echoed prompt is there before anything was computed
        self._echo = request.echo
        self._left = choices_of(request)
        self._spoken: set[int] = set()
        self._failed = self._loading = False
        self._arrived = time.monotonic()
        model.observe("choices", request.n)
        if request.max_tokens is not None:
            model.observe("asked", request.max_tokens)

    def note(self, event: Event) -> None:
        if self._loading and not isinstance(event, Loading):
            self._loading = False
            self._model.observe("load", self._passed())
        match event:
            case Loading():
                self._loading = True
            case Progress() | Prompt():
                pass
            case Finish():
                self._finish(event)
            case _ if not self._echo:
                self._speak(event.choice, self._passed())
            case _:
                pass

    def embedded(self, found: Embeddings) -> None:
        raise AssertionError("vectors, to a request for text")

    def fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._model.error(_kind(error))

    def end(self, *, complete: bool) -> None:
        """A choice that has not finished was lost to an error, or nobody waits for it any more."""
        if not complete and (self._spoken or not self._failed):
            self._model.ended("error" if self._failed else "abort", self._left)

    def _passed(self) -> float:
        return time.monotonic() - self._arrived

    def _speak(self, choice: int, seconds: float) -> None:
        if choice not in self._spoken:
            self._spoken.add(choice)
            self._model.observe("first", seconds)

    def _finish(self, event: Finish) -> None:
        model, usage, timings = self._model, event.usage, event.timings
        self._left -= 1
        decode = timings.eval_ns / 1e9
        prefill = timings.prompt_ns / 1e9
        self._speak(event.choice, max(0.0, self._passed() - decode))
        model.ended(_ENDING[event.reason])
        model.observe("whole", self._passed())
        model.observe("queue", max(0.0, timings.total_ns / 1e9 - prefill - decode))
        model.observe("prefill", prefill)
        model.observe("decode", decode)
        model.observe("inference", prefill + decode)
        model.observe("prompt", usage.prompt_tokens)
        model.observe("computed", usage.prompt_tokens - usage.cached_tokens)
        model.observe("answer", usage.completion_tokens)
        if usage.completion_tokens > 1:
            model.observe("per_token", decode / (usage.completion_tokens - 1))
        model.gaps(timings.gaps_ns)


class EmbedWatch:
    """A request for vectors."""

    def __init__(self, model: OfModel) -> None:
        self._model = model
        self._over = False

    def note(self, event: Event) -> None:
        raise AssertionError("text, to a request for vectors")

    def embedded(self, found: Embeddings) -> None:
        self._over = True
        self._model.embedding("done")

    def fail(self, error: Exception) -> None:
        self._over = True
        self._model.error(_kind(error))

    def end(self, *, complete: bool) -> None:
        if not self._over:
            self._model.embedding("cancelled")


def _kind(error: Exception) -> str:
    return error.kind.value if isinstance(error, AppError) else "internal_error"
