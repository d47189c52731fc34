"""`mlxrunner bench`: measures the latency and the throughput of a server under load.

Knows: the arguments, the default server, the output of the report. Must not know: the definitions
of metrics, HTTP.
"""

import argparse
import asyncio
import json
import math
import os
import secrets
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from app.bench.benchmark import BenchConfig, Benchmark, BenchTarget, LoadLevel
from app.bench.client import ServerAddress
from app.bench.dataset import (
    DEFAULT_INPUT_LEN,
    Dataset,
    FixedDataset,
    RandomDataset,
    TraceDataset,
    read_trace,
)
from app.bench.metrics import LoadRecord, MetricOptions, compute_metrics
from app.bench.report import BenchReport, format_value
from app.commands.servers import get_api_key, get_server_url
from app.config.options import KEY_VARIABLE
from app.config.precedence import resolve_config
from app.core.errors import AppError, ErrorKind
from app.core.terminal import print_message

_DEFAULT_CONCURRENCY = (1, 2, 4, 8)
_COMPARE_ROUNDS = 5


def bench(arguments: argparse.Namespace) -> int:
    """Prints the report and returns the exit status: 1 if no request was completed, 130 after
    Ctrl-C, which ends the benchmark early.

    arguments: the arguments of `add_bench_arguments`. Raises AppError for mutually exclusive
    arguments and for a server that cannot be measured, and KeyboardInterrupt if nothing was
    measured.
    """
    plot: Path | None = arguments.plot
    if plot is not None and not plot.parent.is_dir():
        raise AppError(ErrorKind.INVALID, f"--plot: the folder {plot.parent} does not exist")
    servers = _find_servers(arguments, os.environ)
    config = _make_config(arguments)
    options = MetricOptions(
        percentiles=arguments.metric_percentiles, goodput=dict(arguments.goodput or ())
    )
    benchmark = Benchmark(config, servers, _print_progress)
    interrupted = False
    try:
        asyncio.run(benchmark.run())
    except KeyboardInterrupt:
        interrupted = True
        if not any(result.loads for result in benchmark.results):
            raise
    report = BenchReport(
        config,
        benchmark.results,
        options,
        arguments.percentile_metrics,
        interrupted=interrupted,
    )
    if arguments.json:
        print(json.dumps(report.make_json(), indent=2), flush=True)
    else:
        print(report.render_table(), end="", flush=True)
    if plot is not None:
        plot.write_text(report.draw_chart(), "utf-8")
    if interrupted:
        return 130
    return 0 if report.completed else 1


def _find_servers(
    arguments: argparse.Namespace, environment: Mapping[str, str]
) -> list[tuple[ServerAddress, str | None]]:
    """Returns the address and the model of each server."""
    if arguments.compare and arguments.base_url:
        raise AppError(ErrorKind.INVALID, "--base-url and --compare cannot be combined")
    urls: list[str] = arguments.compare or [arguments.base_url]
    models = _assign("--model", arguments.model, len(urls))
    keys = [
        _read_key(name, environment)
        for name in _assign("--api-key-env", arguments.api_key_env, len(urls))
    ]
    if urls == [None]:
        settings = resolve_config({}, arguments.config, environment).settings
        if settings.tls_cert is not None:
            message = "the server uses TLS: name its address with --base-url https://HOST:PORT"
            raise AppError(ErrorKind.INVALID, message)
        if settings.port == 0:
            message = "--port 0 selects any free port: name the server with --base-url"
            raise AppError(ErrorKind.INVALID, message)
        urls = [get_server_url(settings)]
        keys = keys if arguments.api_key_env else [get_api_key(environment)]
    elif arguments.config is not None:
        message = "--config selects the server of the settings: remove it or the URL"
        raise AppError(ErrorKind.INVALID, message)
    if arguments.insecure and not any(url.startswith("https:") for url in urls):
        raise AppError(ErrorKind.INVALID, "--insecure needs an https URL")
    addresses = [
        ServerAddress.parse(url, key, insecure=arguments.insecure)
        for url, key in zip(urls, keys, strict=True)
    ]
    return list(zip(addresses, models, strict=True))


def _assign(flag: str, values: list[str], servers: int) -> list[str | None]:
    """Returns a value for each server. One value applies to all servers."""
    if len(values) > servers:
        message = f"{flag} is given {len(values)} times for {servers} servers"
        if servers == 1:
            message = f"{flag} can be given twice only with --compare"
        raise AppError(ErrorKind.INVALID, message)
    if not values:
        return [None] * servers
    return [*values] if len(values) == servers else [values[0]] * servers


def _read_key(variable: str | None, environment: Mapping[str, str]) -> str | None:
    if variable is None:
        return environment.get(KEY_VARIABLE, "").strip() or None
    key = environment.get(variable, "").strip()
    if not key:
        raise AppError(ErrorKind.INVALID, f"--api-key-env: the variable {variable} is not set")
    return key


def _make_config(arguments: argparse.Namespace) -> BenchConfig:
    dataset = _make_dataset(arguments)
    rounds = arguments.rounds or (_COMPARE_ROUNDS if arguments.compare else 1)
    return BenchConfig(
        path=arguments.endpoint,
        dataset=dataset,
        levels=_make_levels(arguments, dataset),
        num_prompts=arguments.num_prompts,
        rounds=rounds,
        output_len=arguments.output_len,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        extra_body=arguments.extra_body,
        num_warmups=arguments.num_warmups,
        time_limit=arguments.timeout,
        # a new seed, so that no server has the prompts of an earlier benchmark in its cache
        seed=secrets.token_hex(4) if arguments.seed is None else arguments.seed,
    )


def _make_dataset(arguments: argparse.Namespace) -> Dataset:
    lengths = _list_given(arguments, "input_len", "random_prefix_len")
    trace_flags = _list_given(arguments, "trace_speed", "trace_length_scale")
    sources = [
        flag
        for flag, is_given in (
            ("--prompt", bool(arguments.prompt)),
            ("--dataset-path", arguments.dataset_path is not None),
            (next(iter(lengths), ""), bool(lengths)),
        )
        if is_given
    ]
    if len(sources) > 1:
        raise AppError(ErrorKind.INVALID, f"{' and '.join(sources)} cannot be combined")
    if arguments.dataset_path is not None:
        return TraceDataset(
            rows=read_trace(arguments.dataset_path),
            speed=arguments.trace_speed or 1.0,
            length_scale=arguments.trace_length_scale or 1.0,
        )
    if trace_flags:
        raise AppError(ErrorKind.INVALID, f"{trace_flags[0]} needs --dataset-path")
    if arguments.prompt:
        return FixedDataset(texts=tuple(arguments.prompt))
    return RandomDataset(
        input_len=arguments.input_len or DEFAULT_INPUT_LEN,
        prefix_len=arguments.random_prefix_len or 0,
    )


def _list_given(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Returns the flags that were given."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]


def _make_levels(arguments: argparse.Namespace, dataset: Dataset) -> tuple[LoadLevel, ...]:
    rates: tuple[float, ...] | None = arguments.request_rate
    limits: tuple[int | None, ...] | None = arguments.max_concurrency
    if arguments.burstiness is not None and rates is None:
        raise AppError(ErrorKind.INVALID, "--burstiness needs --request-rate")
    if limits is None:
        is_timed = isinstance(dataset, TraceDataset) and dataset.is_timed
        limits = (None,) if rates is not None or is_timed else _DEFAULT_CONCURRENCY
    return tuple(
        LoadLevel(max_concurrency=limit, request_rate=rate, burstiness=arguments.burstiness or 1.0)
        for rate, limit in product(rates or (math.inf,), limits)
    )


def _print_progress(target: BenchTarget, level: LoadLevel, load: LoadRecord) -> None:
    values = compute_metrics(load, MetricOptions())
    if values["completed"]:
        figures = (
            f"{format_value(values['output_throughput'])} output tokens/s, "
            f"TTFT {format_value(values['median_ttft_ms'])} ms"
        )
    else:
        figures = "no request was completed"
    print_message(f"{target.model} at {target.address.url}, load {level.label}: {figures}")
