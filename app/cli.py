"""The command line: argv -> Settings -> a command.

Knows: options and their words. Must not know: how anything is done. Heavy imports wait until the
arguments are known to be good.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, get_args

from app.core.errors import AppError
from app.core.settings import MEBIBYTE, Bits, CachePolicy, ModelSettings, Settings

GIBIBYTE = 1 << 30

# GiB, MiB or seconds: more than there is, and little enough to be counted in bytes and waited for
_MOST = 1_000_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 with one line on stderr. Bad options exit at once, with 2."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        status = _run(parser, arguments)
        print(end="", flush=True)
        return status
    except AppError as error:
        print(f"mlxrunner: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `list | head`: whoever reads has seen enough
        # or Python tries to write the rest when it ends, and complains
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:  # while something is downloaded; the server has its own way to end
        print("mlxrunner: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "serve":
            return _serve(parser, arguments)
        case "pull":
            from app.commands.pull import pull

            return pull(arguments.model, arguments.revision)
        case "list":
            from app.commands.listing import show_all

            return show_all(as_json=arguments.json)
        case _:
            from app.commands.show import show

            settings = Settings(**_of_the_model(arguments))
            return show(settings, as_json=arguments.json)


def _serve(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        settings = _settings(arguments)
    except AppError as error:
        parser.error(error.message)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # ours only: what libraries say at that level drowns it
    logging.getLogger("app").setLevel(logging.DEBUG if settings.debug else logging.NOTSET)
    # every request of a download, with addresses that are as good as keys
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    from app.server import serve

    return serve(settings)


def _of_the_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings that say which model, and how much of it at once."""
    return {
        "models": () if arguments.model is None else (ModelSettings(name=arguments.model),),
        "quantize": arguments.quantize,
        "parallel": arguments.parallel,
        "context": arguments.context,
        "memory": None if arguments.memory is None else int(arguments.memory * GIBIBYTE),
    }


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        **_of_the_model(arguments),
        pull=arguments.pull,
        host=arguments.host,
        port=arguments.port,
        cors_origins=tuple(arguments.cors_origin),
        max_queue=arguments.max_queue,
        context_shift=arguments.context_shift,
        cache=arguments.cache,
        multi_user=arguments.multi_user,
        exact=arguments.exact,
        prefill_chunk=arguments.prefill_chunk,
        watchdog=arguments.watchdog,
        max_body=int(arguments.max_body * MEBIBYTE),
        ping=arguments.ping,
        debug=arguments.debug,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlxrunner", description="Serve a language model from your own machine on Apple's MLX."
    )
    parser.add_argument("--version", action="version", version=version("mlxrunner"))
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve one model over HTTP")
    _add_model(serve)
    _add_place(serve, Settings())
    _add_engine(serve, Settings())
    _add_limits(serve, Settings())
    pull = commands.add_parser("pull", help="download a model from the Hugging Face hub")
    pull.add_argument("model", metavar="ORG/NAME", help="its name on the hub")
    pull.add_argument("--revision", help="a branch, tag or commit (default: the main branch)")
    listed = commands.add_parser("list", help="list the models that are here")
    show = commands.add_parser("show", help="describe a model, and say whether it fits")
    _add_model(show)
    _add_size(show)
    for command in (listed, show):
        command.add_argument("--json", action="store_true", help="for programs")
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, org/name on the Hugging Face hub, or a name of Ollama's (default: the "
        "built-in model)",
    )


def _add_size(command: argparse.ArgumentParser) -> None:
    """What decides how much memory a model takes."""
    command.add_argument(
        "--quantize",
        type=int,
        choices=get_args(Bits),
        metavar="BITS",
        help="bring unquantised weights to 4 or 8 bits while they are loaded",
    )
    command.add_argument(
        "--parallel",
        type=_whole(1),
        metavar="N",
        help="requests that run at once (default: what suits memory and device)",
    )
    command.add_argument(
        "--context",
        type=_whole(2),
        metavar="TOKENS",
        help="longest prompt and answer together (default: what the model was made for)",
    )
    command.add_argument(
        "--memory",
        type=_amount,
        metavar="GIB",
        help="weights, caches and working space together, in GiB, such as 6 or 6.5 "
        "(default: what suits the device)",
    )


def _add_place(serve: argparse.ArgumentParser, default: Settings) -> None:
    """Where it is served, and to whom."""
    serve.add_argument(
        "--pull", action="store_true", help="download a model that is not here without asking"
    )
    serve.add_argument("--host", default=default.host, help="address to listen on (%(default)s)")
    serve.add_argument("--port", type=_port, default=default.port, help="port (%(default)s)")
    serve.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page origin that may call this server, such as https://chat.example.org; "
        "may be given again (pages on loopback always may)",
    )


def _add_engine(serve: argparse.ArgumentParser, default: Settings) -> None:
    """How the engine uses the device."""
    _add_size(serve)
    serve.add_argument(
        "--context-shift",
        action="store_true",
        help="a full context goes on without its older half, and prompts that are too long lose "
        "their middle; needs --cache slots",
    )
    serve.add_argument(
        "--cache",
        choices=get_args(CachePolicy),
        default=default.cache,
        help="prefix cache: the last conversation, one for each place, or a tree of all "
        "(default: single with --parallel 1, else radix)",
    )
    serve.add_argument(
        "--multi-user",
        action="store_true",
        help="slots serve prompts that share a beginning with a busy one; needs --cache slots",
    )
    serve.add_argument(
        "--exact",
        action="store_true",
        help="cached answers equal uncached ones to the bit, at the price of re-reading answers",
    )
    serve.add_argument(
        "--prefill-chunk",
        type=_whole(1),
        metavar="TOKENS",
        help="prompt tokens per step; a cancellation waits for one step at most "
        "(default: 128 on a CPU, else 512)",
    )


def _add_limits(serve: argparse.ArgumentParser, default: Settings) -> None:
    """What is refused, and what is told."""
    serve.add_argument(
        "--max-queue",
        type=_whole(0),
        default=default.max_queue,
        metavar="N",
        help="requests that may wait for a place; one more is refused with 429 (%(default)s)",
    )
    serve.add_argument(
        "--watchdog",
        type=_amount,
        default=default.watchdog,
        metavar="SECONDS",
        help="silence of a busy engine after which /health reports it (%(default)g)",
    )
    serve.add_argument(
        "--max-body",
        type=_amount,
        default=default.max_body / MEBIBYTE,
        metavar="MIB",
        help="largest request body (%(default)g)",
    )
    serve.add_argument(
        "--ping",
        type=_amount,
        default=default.ping,
        metavar="SECONDS",
        help="silence on a stream after which a comment is sent (%(default)g)",
    )
    serve.add_argument(
        "--debug",
        action="store_true",
        help="log what helps to find a fault; the log then holds pieces of prompts",
    )


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("a port is a number from 0 to 65535")
    return port


def _whole(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:  # named as argparse should call it where `int` raises
        count = int(text)
        if count < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more")
        return count

    return integer


def _amount(text: str) -> float:
    amount = float(text)
    if not 0 < amount <= _MOST:
        raise argparse.ArgumentTypeError(f"must be a number above 0, and at most {_MOST:,}")
    return amount
