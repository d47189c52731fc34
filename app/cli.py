"""The command line: argv -> Settings -> a command.

Knows: options and their words. Must not know: how anything is done. Heavy imports wait until the
arguments are known to be good.
"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from importlib.metadata import version

from app.core.errors import AppError
from app.core.settings import MEBIBYTE, Settings


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 with one line on stderr."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    settings = Settings(
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        cors_origins=tuple(arguments.cors_origin),
        cache=arguments.cache,
        exact=arguments.exact,
        prefill_chunk=arguments.prefill_chunk,
        max_body=int(arguments.max_body * MEBIBYTE),
        keep_alive=arguments.keep_alive,
    )
    from app.server import serve

    try:
        return serve(settings)
    except AppError as error:
        print(f"mlxrunner: {error.message}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlxrunner", description="Serve a language model from your own machine on Apple's MLX."
    )
    parser.add_argument("--version", action="version", version=version("mlxrunner"))
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve one model over HTTP")
    default = Settings()
    serve.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model folder (default: the built-in model)"
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
    serve.add_argument(
        "--cache", choices=["single"], default=default.cache, help="prefix cache (%(default)s)"
    )
    serve.add_argument(
        "--exact",
        action="store_true",
        help="cached answers equal uncached ones to the bit, at the price of re-reading answers",
    )
    serve.add_argument(
        "--prefill-chunk",
        type=_tokens,
        metavar="TOKENS",
        help="prompt tokens per step; a cancellation waits for one step at most "
        "(default: 128 on a CPU, else 512)",
    )
    serve.add_argument(
        "--max-body",
        type=_amount,
        default=default.max_body / MEBIBYTE,
        metavar="MIB",
        help="largest request body (%(default)g)",
    )
    serve.add_argument(
        "--keep-alive",
        type=_amount,
        default=default.keep_alive,
        metavar="SECONDS",
        help="silence on a stream after which a comment is sent (%(default)g)",
    )
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("a port is a number from 0 to 65535")
    return port


def _tokens(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return count


def _amount(text: str) -> float:
    amount = float(text)
    if not 0 < amount < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return amount
