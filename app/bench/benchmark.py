"""A benchmark: all levels and rounds of load, on one server or alternating between two.

Knows: arrival processes, concurrency, the cost of this client, the order of the measurements,
warm-up, the features that a server supports. Must not know: the definitions of metrics, formats of
reports.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from app.bench.client import (
    ConnectionPool,
    HttpExchange,
    RequestFailure,
    RequestRecord,
    ServerAddress,
    StreamedRequest,
    make_stream_body,
    parse_error_body,
)
from app.bench.dataset import (
    BenchPrompt,
    Dataset,
    PromptLength,
    RandomDataset,
    TraceDataset,
    make_words,
)
from app.bench.metrics import LoadRecord
from app.core.errors import AppError, ErrorKind

# seconds between two measurements of the delay of the event loop
_LAG_INTERVAL = 0.02

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

# the lengths in words of the two prompts that show how many tokens a word has
_CALIBRATION_WORDS = (40, 160)

_WARMUP_TOKENS = 8

# connections that remain open between requests, as in other clients
_MAX_IDLE = 1000

# by default, a level has this many requests per concurrent one, and at least the second number
_REQUESTS_PER_SLOT = 4
_MIN_REQUESTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLevel:
    """max_concurrency: None for no limit. request_rate: requests per second; infinite to start all
    requests at once. burstiness: the shape of the gamma distribution of the intervals; 1 is a
    Poisson process, less is burstier, more is more uniform."""

    max_concurrency: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0

    @property
    def label(self) -> str:
        """The level in a report."""
        rate = f"{self.request_rate:g}/s"
        if self.max_concurrency is None:
            return rate if math.isfinite(self.request_rate) else "all"
        if math.isfinite(self.request_rate):
            return f"{self.max_concurrency} at {rate}"
        return str(self.max_concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSession:
    """Requests that run one after the other, such as the turns of a conversation. bodies: the
    bodies of the requests. arrival: seconds after the start of the load; None if the level
    decides."""

    bodies: tuple[Mapping[str, Any], ...]
    arrival: float | None = None


def draw_arrivals(count: int, level: LoadLevel, seed: str) -> list[float]:
    """Returns the start of each session in seconds. The intervals are scaled so that all sessions
    arrive within count / request_rate seconds, as in vLLM."""
    if math.isinf(level.request_rate):
        return [0.0] * count
    if math.isinf(level.burstiness):
        intervals = [1 / level.request_rate] * count
    else:
        rng = random.Random(seed)
        scale = 1 / (level.request_rate * level.burstiness)
        intervals = [rng.gammavariate(level.burstiness, scale) for _ in range(count)]
    total, arrivals = 0.0, list[float]()
    for interval in intervals:
        total += interval
        arrivals.append(total)
    factor = count / level.request_rate / total if total else 1.0
    return [arrival * factor for arrival in arrivals]


class LoadGenerator:
    """Sends sessions to one server.

    records: the requests that have ended. seed: the seed of the arrival times. time_limit: the
    timeout of one request, in seconds.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        path: str,
        sessions: Sequence[ScheduledSession],
        level: LoadLevel,
        *,
        seed: str = "",
        time_limit: float | None = None,
    ) -> None:
        self._time_limit = time_limit
        limit = level.max_concurrency
        self._slots = None if limit is None else asyncio.Semaphore(limit)
        drawn = draw_arrivals(len(sessions), level, seed)
        replays = math.isinf(level.request_rate)
        # requests are encoded before the load starts
        self._sessions = [
            (
                session.arrival if replays and session.arrival is not None else arrival,
                [StreamedRequest(pool, path, body) for body in session.bodies],
            )
            for session, arrival in zip(sessions, drawn, strict=True)
        ]
        self._running = 0
        self._begun = self._cpu_begun = 0.0
        self._duration: float | None = None
        self._lag: list[float] = []
        self.records: list[RequestRecord] = []

    async def run(self) -> None:
        """Sends all requests. On cancellation, disconnects those that are running; the records of
        the others remain."""
        self._cpu_begun = time.process_time()
        self._begun = time.perf_counter()
        tasks = [
            asyncio.create_task(self._run_session(arrival, requests))
            for arrival, requests in self._sessions
        ]
        ticker = asyncio.create_task(self._measure_lag())
        try:
            await asyncio.gather(*tasks)
        finally:
            self._duration = time.perf_counter() - self._begun
            for task in (ticker, *tasks):
                task.cancel()
            await asyncio.gather(ticker, *tasks, return_exceptions=True)

    def make_load_record(self) -> LoadRecord:
        """Returns the measurements of a load that has ended or was cancelled."""
        assert self._duration is not None
        return LoadRecord(
            requests=tuple(self.records),
            duration=self._duration,
            cancelled=self._running,
            cpu_seconds=time.process_time() - self._cpu_begun,
            lag=tuple(self._lag),
        )

    async def _run_session(self, arrival: float, requests: Sequence[StreamedRequest]) -> None:
        delay = self._begun + arrival - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        if self._slots is None:
            await self._send(requests)
        else:
            async with self._slots:
                await self._send(requests)

    async def _send(self, requests: Sequence[StreamedRequest]) -> None:
        for request in requests:
            self._running += 1
            self.records.append(await request.run(self._time_limit))
            # not reached if the request was cancelled
            self._running -= 1

    async def _measure_lag(self) -> None:
        while True:
            due = time.perf_counter() + _LAG_INTERVAL
            await asyncio.sleep(_LAG_INTERVAL)
            self._lag.append(time.perf_counter() - due)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The measurements.

    path: the path of the endpoint. num_prompts: requests per level; None for a number that depends
    on the level, or for the whole trace. rounds: repetitions of each level. output_len: tokens per
    response. ignore_eos: None to find out whether the server supports it. extra_body: fields of
    every request. num_warmups: warm-up requests before the first level; None for the highest
    concurrency. time_limit: the timeout of one request, in seconds. seed: the seed of the prompts
    and the arrivals.
    """

    path: str = CHAT_PATH
    dataset: Dataset = field(default_factory=RandomDataset)
    levels: tuple[LoadLevel, ...] = (LoadLevel(max_concurrency=1),)
    num_prompts: int | None = None
    rounds: int = 1
    output_len: int = 64
    temperature: float = 0.0
    ignore_eos: bool | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    num_warmups: int | None = None
    time_limit: float = 900.0
    seed: str = "0"

    def count_requests(self, level: LoadLevel) -> float:
        """The number of requests of a level. Infinite for the whole trace."""
        if self.num_prompts is not None:
            return self.num_prompts
        if isinstance(self.dataset, TraceDataset):
            return math.inf
        return max(_MIN_REQUESTS, _REQUESTS_PER_SLOT * (level.max_concurrency or 1))

    def count_warmups(self) -> int:
        if self.num_warmups is not None:
            return self.num_warmups
        return max(level.max_concurrency or 1 for level in self.levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """A server. pool: its connections. model: its name in requests. ignore_eos: whether requests
    have this field. length: the token counts of random words."""

    pool: ConnectionPool
    model: str
    ignore_eos: bool = False
    length: PromptLength = field(default_factory=PromptLength)

    @property
    def address(self) -> ServerAddress:
        return self.pool.address


@dataclass(slots=True, kw_only=True)
class TargetResult:
    """loads: the loads of each level, one per round. The last one is incomplete if the benchmark
    was interrupted."""

    target: BenchTarget
    loads: dict[LoadLevel, list[LoadRecord]] = field(
        default_factory=dict[LoadLevel, list[LoadRecord]]
    )


class Benchmark:
    """Runs the loads. servers: the addresses, with a model or None for the server's first one.
    on_progress: called after each load. results: the measurements so far, by server."""

    def __init__(
        self,
        config: BenchConfig,
        servers: Sequence[tuple[ServerAddress, str | None]],
        on_progress: Callable[[BenchTarget, LoadLevel, LoadRecord], None],
    ) -> None:
        self._config = config
        self._servers = servers
        self._on_progress = on_progress
        self.results: list[TargetResult] = []

    async def run(self) -> None:
        """Runs all levels and rounds. On cancellation, `results` has the loads so far.

        Raises AppError for a server that cannot be measured.
        """
        pools = [ConnectionPool(address, _MAX_IDLE) for address, _ in self._servers]
        try:
            await self._run(pools)
        finally:
            for pool in pools:
                pool.close()

    async def _run(self, pools: Sequence[ConnectionPool]) -> None:
        targets = [
            await probe_server(pool, model, self._config)
            for pool, (_, model) in zip(pools, self._servers, strict=True)
        ]
        # both servers get the same prompts
        targets = [replace(target, length=targets[0].length) for target in targets]
        results = [TargetResult(target=target) for target in targets]
        for target in targets:
            await self._warm_up(target)
        self.results = results
        # a server that is compared with itself must not have the second prompts in its cache
        one_server = len({target.address.url for target in targets}) < len(targets)
        for level in self._config.levels:
            for turn in range(self._config.rounds):
                label = f"{level.label}/{turn}"
                # A B, B A, A B: drift of the machine affects both
                for result in results if turn % 2 == 0 else reversed(results):
                    await self._run_load(result, level, label)
                    if one_server:
                        label += "/again"

    async def _warm_up(self, target: BenchTarget) -> None:
        """The first requests load and allocate. They also put a shared prefix into the cache."""
        count = self._config.count_warmups()
        if not count:
            return
        config = replace(self._config, num_prompts=count)
        if isinstance(config.dataset, TraceDataset):
            config = replace(config, dataset=RandomDataset())
        config = replace(config, output_len=min(_WARMUP_TOKENS, config.output_len))
        level = max(config.levels, key=lambda level: level.max_concurrency or 1)
        level = LoadLevel(max_concurrency=level.max_concurrency)
        sessions = list(make_sessions(target, config, level, "warm-up"))
        load = LoadGenerator(
            target.pool, config.path, sessions, level, time_limit=config.time_limit
        )
        await load.run()
        errors = [record.error for record in load.records if record.error is not None]
        if len(errors) == len(load.records):
            message = f"{target.address.url}: {errors[0].kind}: {errors[0].message}"
            raise AppError(ErrorKind.ENGINE, message)

    async def _run_load(self, result: TargetResult, level: LoadLevel, label: str) -> None:
        target, config = result.target, self._config
        sessions = list(make_sessions(target, config, level, label))
        load = LoadGenerator(
            target.pool,
            config.path,
            sessions,
            level,
            seed=f"{config.seed}/{label}",
            time_limit=config.time_limit,
        )
        try:
            await load.run()
        finally:
            record = load.make_load_record()
            result.loads.setdefault(level, []).append(record)
        self._on_progress(target, level, record)


def make_sessions(
    target: BenchTarget, config: BenchConfig, level: LoadLevel, label: str
) -> Iterator[ScheduledSession]:
    """Yields the sessions of a load, with the number of requests that the configuration sets."""
    rest = config.count_requests(level)
    for session in config.dataset.make_sessions(label, config.seed, target.length):
        prompts = session.prompts[: round(rest)] if rest < math.inf else session.prompts
        if not prompts:
            return
        bodies = tuple(make_body(target, config, prompt) for prompt in prompts)
        yield ScheduledSession(bodies=bodies, arrival=session.arrival)
        rest -= len(prompts)


def make_body(target: BenchTarget, config: BenchConfig, prompt: BenchPrompt) -> dict[str, Any]:
    """Returns the body of a request. Raises AppError(INVALID) for a conversation that is sent to
    the endpoint of completions."""
    body: dict[str, Any] = {"model": target.model}
    if config.path.endswith("/chat/completions"):
        user = {"role": "user", "content": prompt.text}
        body["messages"] = list(prompt.messages) or [user]
        if prompt.tools:
            body["tools"] = list(prompt.tools)
    elif prompt.messages:
        message = f"the trace has messages: use --endpoint {CHAT_PATH}"
        raise AppError(ErrorKind.INVALID, message)
    else:
        body["prompt"] = prompt.text
    body["max_tokens"] = prompt.output_tokens or config.output_len
    body["temperature"] = config.temperature
    if target.ignore_eos:
        body["ignore_eos"] = True
    return {**make_stream_body(body), **config.extra_body}


async def probe_server(pool: ConnectionPool, model: str | None, config: BenchConfig) -> BenchTarget:
    """Finds the model, whether the server accepts `ignore_eos`, and the length of random words.

    Raises AppError for a server that rejects requests.
    """
    if model is None:
        model = await _find_model(pool)
    target = BenchTarget(pool=pool, model=model, ignore_eos=config.ignore_eos is not False)
    counts: list[float | None] = []
    for words in _CALIBRATION_WORDS:
        text = make_words(f"{config.seed}/calibration/{words}", words)
        try:
            usage = await _complete(target, config, text)
        except RequestFailure as failure:
            rejected = failure.kind.startswith("http_4") and config.ignore_eos is None
            if not (rejected and target.ignore_eos):
                raise _describe_failure(pool.address, failure) from failure
            target = replace(target, ignore_eos=False)
            try:
                usage = await _complete(target, config, text)
            except RequestFailure as other:
                raise _describe_failure(pool.address, other) from other
        counts.append(usage.get("prompt_tokens"))
    few, many = counts
    if few is None or many is None or many <= few:
        return target
    per_word = (many - few) / (_CALIBRATION_WORDS[1] - _CALIBRATION_WORDS[0])
    fixed = max(0.0, few - per_word * _CALIBRATION_WORDS[0])
    return replace(target, length=PromptLength(tokens_per_word=per_word, template_tokens=fixed))


async def _complete(target: BenchTarget, config: BenchConfig, text: str) -> Mapping[str, Any]:
    """Returns the usage of a short completion without a stream."""
    body = make_body(target, config, BenchPrompt(text=text, output_tokens=1))
    del body["stream"], body["stream_options"]
    reply = await _fetch(target.pool, "POST", config.path, json.dumps(body).encode())
    return reply.get("usage") or {}


async def _find_model(pool: ConnectionPool) -> str:
    try:
        models: Any = await _fetch(pool, "GET", "/v1/models")
    except RequestFailure as failure:
        raise _describe_failure(pool.address, failure) from failure
    for model in models.get("data") or ():
        return str(model["id"])
    message = f"{pool.address.url} lists no model: name one with --model"
    raise AppError(ErrorKind.MODEL_NOT_FOUND, message)


async def _fetch(
    pool: ConnectionPool, method: str, path: str, body: bytes | None = None
) -> Mapping[str, Any]:
    exchange = HttpExchange(pool, path, body, method)
    reply = await exchange.read_body()
    if exchange.status != 200:
        raise parse_error_body(exchange.status, reply)
    try:
        parsed: object = json.loads(reply)
    except ValueError as error:
        raise RequestFailure("invalid_response", "the response is not JSON") from error
    if not isinstance(parsed, dict):
        raise RequestFailure("invalid_response", "the response is not a JSON object")
    return cast("dict[str, Any]", parsed)


def _describe_failure(address: ServerAddress, failure: RequestFailure) -> AppError:
    if failure.kind.startswith(("http_401", "http_403")):
        message = (
            f"the server at {address.url} requires an API key: set MLXRUNNER_API_KEY, or name "
            "another variable with --api-key-env"
        )
        return AppError(ErrorKind.UNAUTHORIZED, message)
    if failure.kind == "connection_failed":
        message = (
            f"no server at {address.url}: start one with `mlxrunner serve`, or name another with "
            "--base-url"
        )
        return AppError(ErrorKind.ENGINE, message)
    return AppError(ErrorKind.ENGINE, f"{address.url}: {failure.kind}: {failure.message}")
