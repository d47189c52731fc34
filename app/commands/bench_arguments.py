"""The arguments of `mlxrunner bench`. The names are those of `vllm bench serve` where it has them.

Knows: argparse, the values of arguments. Must not know: how a benchmark uses them. Imports no heavy
modules, because every command builds the parser.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from app.core.units import parse_duration

_AddArgument = Callable[..., argparse.Action]

_ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_LATENCIES = ("ttft", "tpot", "itl", "e2el")
_GOODPUT_LATENCIES = ("ttft", "tpot", "e2el")


def add_bench_arguments(command: argparse.ArgumentParser) -> None:
    """Adds all arguments. An argument without a default is None if it is not given."""
    _add_server_arguments(command.add_argument_group("server").add_argument)
    _add_load_arguments(command.add_argument_group("load").add_argument)
    _add_prompt_arguments(command.add_argument_group("prompts").add_argument)
    _add_request_arguments(command.add_argument_group("requests").add_argument)
    _add_report_arguments(command.add_argument_group("report").add_argument)


def _add_server_arguments(add: _AddArgument) -> None:
    add(
        "--base-url",
        metavar="URL",
        help="an OpenAI-compatible server (default: the address in the settings)",
    )
    add(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="alternate between two servers and print ratios",
    )
    add(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="model name; with --compare, may be given twice, for A and B (default: the first one)",
    )
    add(
        "--endpoint",
        type=_parse_endpoint,
        default=_ENDPOINTS["chat"],
        metavar="chat|completions",
        help="endpoint, or its path (default: chat)",
    )
    add(
        "--api-key-env",
        action="append",
        default=[],
        metavar="VARIABLE",
        help="variable that holds the API key; with --compare, may be given twice, for A and B "
        "(default: MLXRUNNER_API_KEY)",
    )
    add("--insecure", action="store_true", help="accept any TLS certificate")
    add("--config", metavar="FILE", help="TOML file with the server's settings")


def _add_load_arguments(add: _AddArgument) -> None:
    add(
        "--max-concurrency",
        type=_parse_list(_parse_positive_integer),
        metavar="N[,N...]",
        help="concurrent requests; one level for each number (default: 1,2,4,8, no limit with "
        "--request-rate and for a trace with timestamps)",
    )
    add(
        "--request-rate",
        type=_parse_list(_parse_positive),
        metavar="R[,R...]",
        help="requests per second; one level for each number (default: inf, all at once)",
    )
    add(
        "--burstiness",
        type=_parse_positive,
        metavar="F",
        help="shape of the gamma distribution of the intervals: 1 is a Poisson process, less is "
        "burstier (default: 1)",
    )
    add(
        "--num-prompts",
        type=_parse_positive_integer,
        metavar="N",
        help="requests per level (default: 4 per concurrent request, at least 16; the whole trace)",
    )
    add(
        "--rounds",
        type=_parse_positive_integer,
        metavar="N",
        help="repetitions of each level; figures are medians (default: 1, 5 with --compare)",
    )
    add(
        "--num-warmups",
        type=_parse_count,
        metavar="N",
        help="warm-up requests before the first level (default: the highest concurrency)",
    )
    add(
        "--timeout",
        type=_parse_timeout,
        default=900.0,
        metavar="TIME",
        help="longest duration of a request (default: 15m)",
    )
    add("--seed", metavar="TEXT", help="seed of prompts and arrivals (default: random)")


def _add_prompt_arguments(add: _AddArgument) -> None:
    add(
        "--input-len",
        type=_parse_positive_integer,
        metavar="TOKENS",
        help="prompts of random words of this length (default: 128)",
    )
    add(
        "--random-prefix-len",
        type=_parse_count,
        metavar="TOKENS",
        help="length of a prefix that all prompts share, in addition to --input-len (default: 0)",
    )
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="send this prompt, unchanged; repeatable",
    )
    add(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="trace with one JSON object per line: prompt, messages, or input_length and hash_ids; "
        "output_length and timestamp (ms) are optional",
    )
    add(
        "--trace-speed",
        type=_parse_positive,
        metavar="F",
        help="divide the timestamps of the trace by this; inf ignores them (default: 1)",
    )
    add(
        "--trace-length-scale",
        type=_parse_positive,
        metavar="F",
        help="multiply input_length and output_length of the trace by this (default: 1)",
    )


def _add_request_arguments(add: _AddArgument) -> None:
    add(
        "--output-len",
        type=_parse_positive_integer,
        default=64,
        metavar="TOKENS",
        help="tokens per response (default: 64)",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="whether to generate all tokens even if the model ends the output (default: yes, if "
        "the server accepts the field)",
    )
    add("--temperature", type=_parse_number, default=0.0, metavar="F", help="(default: 0)")
    add(
        "--extra-body",
        type=_parse_object,
        default={},
        metavar="JSON",
        help="fields to add to each request",
    )


def _add_report_arguments(add: _AddArgument) -> None:
    add(
        "--percentile-metrics",
        type=_parse_list(_parse_latency),
        default=_LATENCIES,
        metavar="NAME[,NAME...]",
        help=f"latencies in the table (default: {','.join(_LATENCIES)})",
    )
    add(
        "--metric-percentiles",
        type=_parse_list(_parse_percentile),
        default=(50.0, 90.0, 99.0),
        metavar="P[,P...]",
        help="percentiles of each latency (default: 50,90,99)",
    )
    add(
        "--goodput",
        nargs="+",
        type=_parse_objective,
        metavar="NAME:MS",
        help="count the requests that meet all of these objectives, for example ttft:200 tpot:50",
    )
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="FILE", help="write a chart as SVG")


def _parse_endpoint(word: str) -> str:
    path = _ENDPOINTS.get(word, word)
    if path not in _ENDPOINTS.values():
        raise argparse.ArgumentTypeError(f"invalid endpoint {word!r}: use chat or completions")
    return path


def _parse_list(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse_items(words: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(parse(word.strip()) for word in words.split(",")))

    return parse_items


def _parse_positive_integer(word: str) -> int:
    count = _parse_count(word)
    if count == 0:
        raise argparse.ArgumentTypeError("must be at least 1, not 0")
    return count


def _parse_count(word: str) -> int:
    if not (word.isascii() and word.isdigit() and len(word) < 10):
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 0 to 999999999")
    return int(word)


def _parse_number(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if math.isnan(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of at least 0")
    return number


def _parse_positive(word: str) -> float:
    number = _parse_number(word)
    if number == 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


def _parse_timeout(word: str) -> float:
    seconds = parse_duration(word)
    if seconds is None or seconds <= 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not a duration such as 90s, 15m or 1h")
    return seconds


def _parse_percentile(word: str) -> float:
    number = _parse_number(word)
    if number > 100:
        raise argparse.ArgumentTypeError(f"percentile {word} is above 100")
    return number


def _parse_latency(word: str) -> str:
    if word not in _LATENCIES:
        raise argparse.ArgumentTypeError(f"unknown metric {word!r}: use {', '.join(_LATENCIES)}")
    return word


def _parse_objective(word: str) -> tuple[str, float]:
    """Returns the latency and its limit in seconds."""
    name, _, limit = word.partition(":")
    if name not in _GOODPUT_LATENCIES:
        known = ", ".join(_GOODPUT_LATENCIES)
        raise argparse.ArgumentTypeError(f"unknown objective {word!r}: use NAME:MS with {known}")
    return name, _parse_positive(limit) / 1000


def _parse_object(text: str) -> dict[str, Any]:
    try:
        parsed: object = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return cast("dict[str, Any]", parsed)
