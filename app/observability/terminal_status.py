"""The output of a running server on a terminal besides its log: a banner, and the progress of loads
and of long prefills.

Knows: the states of models, the events of requests. Must not know: the log, how a line is
rewritten.
"""

import asyncio
import contextlib
import json
import shlex
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from app.core.distributions import get_own_version
from app.core.errors import escape_control_characters
from app.core.events import Event, PrefillProgress
from app.core.jobs import ComputeBackend
from app.core.models import ModelState
from app.core.requests import Embeddings, EmbedRequest, GenerateRequest
from app.core.terminal import OutputTerminal, draw_bar
from app.core.units import format_duration, format_memory, pluralize

# the number of seconds between two updates of the status line
_INTERVAL = 0.2

# a prefill is shown after this number of seconds
_LONG_PREFILL = 1.0

_BACKEND_NAMES: Mapping[str, str] = {"cpu": "CPU", "gpu": "GPU"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BannerAddress:
    """url: without a path. needs_key: whether requests need an API key."""

    url: str
    needs_key: bool


@dataclass(slots=True)
class _Prefill:
    """began: a monotonic time in seconds. cached_tokens: those that were not computed."""

    model: str
    began: float
    cached_tokens: int
    computed_tokens: int
    total_tokens: int


class TerminalStatus:
    """Shows the banner once the models are loaded, and a status line while something takes long.

    show_status: replaces the status line; "" removes it. write: writes lines above it. clock: in
    seconds.
    """

    def __init__(
        self,
        show_status: Callable[[str], None],
        write: Callable[[str], None],
        terminal: OutputTerminal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show_status = show_status
        self._write = write
        self._terminal = terminal
        self._clock = clock
        self._prefills: dict[int, _Prefill] = {}
        self._shown = ""
        self._has_banner = False

    def observe(self, request: GenerateRequest | EmbedRequest) -> "PrefillObserver":
        """Implements app.core.request_lifecycle.ObserverFactory."""
        return PrefillObserver(request.model, self._prefills, self._clock)

    @contextlib.asynccontextmanager
    async def run(
        self,
        list_states: Callable[[], Sequence[ModelState]],
        is_ready: Callable[[], bool],
        get_address: Callable[[], BannerAddress],
    ) -> AsyncGenerator[None]:
        """Updates the terminal until the context exits. is_ready: whether the models that are
        loaded at start are loaded. get_address: called when they are."""

        async def update_repeatedly() -> None:
            while True:
                self._update(list_states())
                if not self._has_banner and is_ready():
                    self._has_banner = True
                    self._write(render_banner(list_states(), get_address(), self._terminal))
                await asyncio.sleep(_INTERVAL)

        task = asyncio.create_task(update_repeatedly())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._update(())

    def _update(self, states: Sequence[ModelState]) -> None:
        if not self._terminal.can_rewrite:
            return
        text = self._render(states)
        if text != self._shown:
            self._shown = text
            self._show_status(text)

    def _render(self, states: Sequence[ModelState]) -> str:
        loading = [state for state in states if state.phase == "loading"]
        now = self._clock()
        long = [one for one in self._prefills.values() if now - one.began >= _LONG_PREFILL]
        parts = [render_load(state) for state in loading]
        parts += [_render_prefill(max(long, key=lambda one: one.total_tokens), now)] if long else []
        parts += [f"+{len(long) - 1} more"] if len(long) > 1 else []
        return ", ".join(parts)


class PrefillObserver:
    """Records the prefill of one request. Implements app.core.request_lifecycle.RequestObserver."""

    def __init__(
        self, model: str, prefills: dict[int, _Prefill], clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._prefills = prefills
        self._clock = clock

    def on_event(self, event: Event) -> None:
        # if a request has several prompts, the one with the latest event is shown
        if not isinstance(event, PrefillProgress) or event.computed_tokens >= event.total_tokens:
            self._prefills.pop(id(self), None)
            return
        known = self._prefills.get(id(self))
        if known is None or known.total_tokens != event.total_tokens:
            self._prefills[id(self)] = _Prefill(
                model=self._model,
                began=self._clock(),
                cached_tokens=event.computed_tokens,
                computed_tokens=event.computed_tokens,
                total_tokens=event.total_tokens,
            )
        else:
            known.computed_tokens = event.computed_tokens

    def on_embeddings(self, found: Embeddings) -> None:
        pass

    def on_error(self, error: Exception) -> None:
        pass

    def on_end(self, *, complete: bool) -> None:
        self._prefills.pop(id(self), None)


def render_load(state: ModelState) -> str:
    name = escape_control_characters(state.name)
    return f"loading {name} {draw_bar(state.progress, 100)} {state.progress} %"


def _render_prefill(prefill: _Prefill, now: float) -> str:
    name = escape_control_characters(prefill.model)
    done, total = prefill.computed_tokens, prefill.total_tokens
    text = f"prefill {name} {draw_bar(done, total)} {done}/{total} tokens"
    speed = (done - prefill.cached_tokens) / (now - prefill.began)
    if speed > 0:
        text += f", {speed:.0f} tok/s, {format_duration((total - done) / speed)} left"
    return text


def render_banner(
    states: Sequence[ModelState], address: BannerAddress, terminal: OutputTerminal
) -> str:
    """Renders the address of the server, its models, and commands to try next."""
    loaded = [state for state in states if state.phase == "ready"]
    first = (loaded or list(states))[0]
    rows = [
        ("address", terminal.paint(address.url, "cyan")),
        ("model", _describe_models(first, len(states))),
        ("memory", _describe_memory(first)),
        ("device", "" if first.backend is None else _describe_device(first.backend)),
    ]
    steps = _list_next_steps(escape_control_characters(first.name), address)
    rows += [("try" if index == 0 else "", step) for index, step in enumerate(steps)]
    lines = [f"  {terminal.paint(f'{label:<8}', 'dim')} {value}" for label, value in rows if value]
    title = terminal.paint(f"mlxrunner {get_own_version()}", "bold")
    return "\n".join(["", f"  {title}", *lines, ""])


def _describe_models(first: ModelState, count: int) -> str:
    text = escape_control_characters(first.name)
    if first.context_length and first.parallel:
        text += f", context {first.context_length} tokens, {pluralize(first.parallel, 'slot')}"
    return text if count == 1 else f"{text}; {count - 1} more can be requested"


def _describe_memory(state: ModelState) -> str:
    ledger = state.stats.ledger
    text = f"{format_memory(state.stats.allocated_bytes)} used"
    if ledger.budget:
        text += f" of {format_memory(ledger.budget)}"
    if ledger.prefix_limit:
        limit, share = format_memory(ledger.prefix_limit), round(100 * ledger.prefix_share)
        text += f", cached prefixes up to {limit} ({share} %)"
    return text


def _describe_device(backend: ComputeBackend) -> str:
    parts = [_BACKEND_NAMES[backend.device]]
    if backend.kernels is not None:
        parts.append(f"{backend.kernels} kernels")
    if backend.activations is not None:
        parts.append(f"{backend.activations}-bit activations")
    if backend.blas is not None:
        parts.append(backend.blas)
    if backend.threads is not None:
        parts.append(pluralize(backend.threads, "thread"))
    return ", ".join(parts)


def _list_next_steps(model: str, address: BannerAddress) -> Sequence[str]:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    key = ' -H "Authorization: Bearer $MLXRUNNER_API_KEY"' if address.needs_key else ""
    curl = (
        f"curl {address.url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )
    return [f"{address.url}/ in a browser", f"mlxrunner run {shlex.quote(model)}", curl]
