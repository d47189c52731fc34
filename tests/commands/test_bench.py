"""`mlxrunner bench`: its arguments, and complete runs against scripted and real servers."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app import cli
from tests.bench.scripted_server import (
    DONE,
    ScriptedExchange,
    ScriptedServer,
    answer,
    finish_event,
    text_event,
)
from tests.commands.thread_server import run_thread_server
from tests.server_process import ROOT, TIMEOUT, UNTRACED

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer).run() as running:
        yield running


def run(*words: str) -> int:
    return cli.main(["bench", *words])


def expect_error(capsys: Capture, *words: str, status: int = 1) -> str:
    """The one line on stderr."""
    if status == 2:
        with pytest.raises(SystemExit) as exit_:
            run(*words)
        assert exit_.value.code == 2
    else:
        assert run(*words) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("mlxrunner: ")
    return line


def start_bench(*words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "app", "bench", *words],
        cwd=ROOT,
        env={**os.environ, **UNTRACED},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_table_of_a_server(server: ScriptedServer, capsys: Capture) -> None:
    assert run("--base-url", server.url, "--max-concurrency", "1,2", "--num-prompts", "4") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"scripted at {server.url}/v1/chat/completions\n")
    assert re.search(r"^concurrency +1 +2$", out, re.MULTILINE)
    assert re.search(r"^completed requests +4 +4$", out, re.MULTILINE)
    assert re.search(r"^output tokens +256 +256$", out, re.MULTILINE)
    assert len(err.splitlines()) == 2
    assert "load 2: " in err


def test_json_and_a_plot(server: ScriptedServer, capsys: Capture, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    words = ["--base-url", f"{server.url}/v1", "--max-concurrency", "2", "--output-len", "5"]
    words += ["--endpoint", "completions", "--seed", "abc", "--temperature", "0.5"]
    words += ["--goodput", "ttft:60000", "tpot:60000", "--extra-body", '{"top_p": 0.9}']
    assert run(*words, "--json", "--plot", str(plot), "--model", "other") == 0
    document = json.loads(capsys.readouterr().out)
    [level] = document["servers"][0]["levels"]
    assert (level["completed"], level["total_output_tokens"]) == (16, 80)
    assert level["request_goodput"] == level["request_throughput"]
    assert document["config"]["seed"] == "abc"
    ElementTree.fromstring(plot.read_text())
    body = server.requests[-1].body
    assert (body["model"], body["temperature"], body["top_p"]) == ("other", 0.5, 0.9)
    assert server.requests[-1].path == "/v1/completions"


def test_the_same_seed_gives_the_same_prompts_and_no_seed_others(server: ScriptedServer) -> None:
    words = ["--base-url", server.url, "--max-concurrency", "1", "--num-prompts", "2"]
    words += ["--num-warmups", "0"]
    for more in (["--seed", "x"], ["--seed", "x"], []):
        assert run(*words, *more) == 0
    first, second, other = (server.list_prompts()[i : i + 2] for i in (0, 2, 4))
    assert first == second
    assert set(first).isdisjoint(other)


def test_a_trace_with_times_is_replayed(
    server: ScriptedServer, capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"prompt": "second", "timestamp": 1000, "output_length": 3},
        {"input_length": 100, "timestamp": 0, "output_length": 20},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ["--dataset-path", str(file), "--trace-speed", "5", "--trace-length-scale", "0.5"]
    assert run("--base-url", server.url, *words, "--num-warmups", "0", "--json") == 0
    first, second = (r.body for r in server.requests if r.body.get("stream"))
    # 50 tokens, two of which are the template
    assert len(first["messages"][0]["content"].split()) == 48
    assert (first["max_tokens"], second["max_tokens"]) == (10, 3)
    [level] = json.loads(capsys.readouterr().out)["servers"][0]["levels"]
    assert level["max_concurrency"] is None


def test_two_servers_are_compared(server: ScriptedServer, capsys: Capture) -> None:
    with ScriptedServer(answer).run() as b:
        words = ["--compare", server.url, b.url, "--model", "scripted", "--model", "other"]
        words += ["--max-concurrency", "1", "--num-prompts", "1"]
        assert run(*words) == 0
        assert b.requests[-1].body["model"] == "other"
    out = capsys.readouterr().out
    assert f"A: scripted at {server.url}" in out
    assert f"B: other at {b.url}" in out
    assert "median of 5 rounds" in out
    assert re.search(r"^TTFT median, ms +\S+ +\S+ +[\d.]+$", out, re.MULTILINE)


def test_rates_are_levels(server: ScriptedServer, capsys: Capture) -> None:
    words = ["--request-rate", "100,200", "--burstiness", "2", "--num-prompts", "4", "--json"]
    assert run("--base-url", server.url, *words) == 0
    levels = json.loads(capsys.readouterr().out)["servers"][0]["levels"]
    assert [level["request_rate"] for level in levels] == [100, 200]
    assert levels[0]["duration"] >= 0.03


def test_api_keys_come_from_variables(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = ["--max-concurrency", "1", "--num-prompts", "1", "--num-warmups", "0"]

    def get_key(of: ScriptedServer) -> str | None:
        return of.requests[-1].headers.get("authorization")

    assert run("--base-url", server.url, *words) == 0
    assert get_key(server) is None
    monkeypatch.setenv("MLXRUNNER_API_KEY", "first-key")
    assert run("--base-url", server.url, *words) == 0
    assert get_key(server) == "Bearer first-key"
    monkeypatch.setenv("KEY_A", "a-key")
    monkeypatch.setenv("KEY_B", "b-key")
    with ScriptedServer(answer).run() as b:
        compared = ["--compare", server.url, b.url, "--api-key-env", "KEY_A"]
        assert run(*compared, "--api-key-env", "KEY_B", "--rounds", "1", *words) == 0
        assert (get_key(server), get_key(b)) == ("Bearer a-key", "Bearer b-key")
    out, err = capsys.readouterr()
    assert "-key" not in out + err


def test_the_default_is_the_server_of_the_settings(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The first of MLXRUNNER_API_KEYS is a key of that server, and is sent to no other."""
    port = server.url.rpartition(":")[2]
    words = ["--max-concurrency", "1", "--num-prompts", "1"]
    monkeypatch.setenv("MLXRUNNER_API_KEYS", "anna=mr-anna")
    monkeypatch.setenv("MLXRUNNER_PORT", port)
    assert run(*words) == 0
    assert server.requests[-1].headers["authorization"] == "Bearer mr-anna"
    monkeypatch.delenv("MLXRUNNER_PORT")
    (tmp_path / "a.toml").write_text(f"port = {port}\n")
    assert run("--config", str(tmp_path / "a.toml"), *words) == 0
    assert run("--base-url", server.url, *words) == 0
    assert "authorization" not in server.requests[-1].headers


def test_failures_are_counted_and_shown(capsys: Capture) -> None:
    count = iter(range(100))

    def script(exchange: ScriptedExchange) -> None:
        if exchange.body.get("stream") and next(count) % 2:
            exchange.send_json({"error": {"code": "server_busy", "message": "full"}}, status=429)
        else:
            answer(exchange)

    with ScriptedServer(script).run() as server:
        words = ["--max-concurrency", "1", "--num-prompts", "4", "--num-warmups", "1"]
        assert run("--base-url", server.url, *words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^failed requests +2$", out, re.MULTILINE)
    assert "scripted, concurrency 1: 2 requests failed: http_429 server_busy: full\n" in out


def test_a_run_without_a_completed_request_fails(capsys: Capture) -> None:
    def script(exchange: ScriptedExchange) -> None:
        if exchange.body.get("stream"):
            exchange.send_json({"error": {"message": "broken"}}, status=500)
        else:
            answer(exchange)

    with ScriptedServer(script).run() as server:
        words = ["--max-concurrency", "1", "--num-prompts", "2", "--num-warmups", "0"]
        assert run("--base-url", server.url, *words) == 1
    out, err = capsys.readouterr()
    assert "2 requests failed: http_500: broken" in out
    assert "no request was completed" in err


class HeldServer:
    """Answers the first `count` streams of a load; the others wait for the release."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self.held = threading.Event()
        self.release = threading.Event()

    def __call__(self, exchange: ScriptedExchange) -> None:
        with self._lock:
            self._left -= bool(exchange.body.get("stream"))
            hold = self._left < 0
        if hold:
            self.held.set()
            self.release.wait(TIMEOUT)
        answer(exchange)


def interrupt(script: HeldServer, *words: str) -> tuple[int, str, str]:
    """The status, stdout and stderr of a run that gets Ctrl-C while a request is running."""
    with ScriptedServer(script).run() as server:
        bench = start_bench("--base-url", server.url, "--num-warmups", "0", *words)
        assert script.held.wait(TIMEOUT)
        bench.send_signal(signal.SIGINT)
        out, err = bench.communicate(timeout=TIMEOUT)
        script.release.set()
    return bench.returncode, out, err


def test_ctrl_c_prints_the_results_so_far() -> None:
    status, out, err = interrupt(HeldServer(3), "--max-concurrency", "1", "--num-prompts", "9")
    assert status == 130
    assert "interrupted: these are the results so far" in out
    assert re.search(r"^completed requests +3$", out, re.MULTILINE)
    assert "1 request cancelled" in out
    assert "Traceback" not in err


def test_ctrl_c_prints_valid_json() -> None:
    status, out, _ = interrupt(HeldServer(2), "--max-concurrency", "1", "--json")
    assert status == 130
    document = json.loads(out)
    assert document["interrupted"] is True
    assert document["servers"][0]["levels"][0]["completed"] == 2


def test_ctrl_c_in_the_warm_up_prints_one_line() -> None:
    with ScriptedServer(script := HeldServer(0)).run() as server:
        bench = start_bench("--base-url", server.url)
        assert script.held.wait(TIMEOUT)
        bench.send_signal(signal.SIGINT)
        out, err = bench.communicate(timeout=TIMEOUT)
        script.release.set()
    assert (bench.returncode, out, err) == (130, "", "mlxrunner: interrupted\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--base-url nonsense", "'nonsense' is not the URL of a server"),
        ("--base-url http://a --compare http://a http://b", "--base-url and --compare cannot be"),
        ("--base-url http://a --config x.toml", "--config selects the server of the settings"),
        ("--base-url http://a --model x --model y", "--model can be given twice only with"),
        ("--compare http://a http://b --model x --model y --model z", "given 3 times"),
        ("--base-url http://a --api-key-env UNSET_KEY", "the variable UNSET_KEY is not set"),
        ("--base-url http://a --insecure", "--insecure needs an https URL"),
        ("--burstiness 2", "--burstiness needs --request-rate"),
        ("--trace-speed 2", "--trace-speed needs --dataset-path"),
        ("--trace-length-scale 2", "--trace-length-scale needs --dataset-path"),
        ("--prompt a --input-len 9", "--prompt and --input-len cannot be combined"),
        ("--prompt a --dataset-path f", "--prompt and --dataset-path cannot be combined"),
        ("--random-prefix-len 9 --dataset-path f", "--dataset-path and --random-prefix-len"),
        ("--dataset-path missing.jsonl", "missing.jsonl cannot be read: No such file"),
        ("--plot missing/plot.svg", "--plot: the folder missing does not exist"),
    ],
)
def test_arguments_that_exclude_each_other_are_rejected(
    words: str, message: str, capsys: Capture
) -> None:
    assert message in expect_error(capsys, *words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-concurrency 0", "must be at least 1"),
        ("--max-concurrency 1,x", "'x' is not a whole number"),
        ("--request-rate 0", "must be more than 0"),
        ("--request-rate fast", "'fast' is not a number"),
        ("--endpoint embeddings", "use chat or completions"),
        ("--goodput itl:9", "unknown objective 'itl:9': use NAME:MS with ttft, tpot, e2el"),
        ("--goodput ttft", "is not a number"),
        ("--percentile-metrics latency", "unknown metric 'latency': use ttft, tpot, itl, e2el"),
        ("--metric-percentiles 101", "percentile 101 is above 100"),
        ("--extra-body [1]", "is not a JSON object"),
        ("--timeout soon", "is not a duration"),
        ("--temperature -1", "is not a number of at least 0"),
        ("--nonsense", "unknown option --nonsense"),
    ],
)
def test_an_invalid_argument_is_rejected_in_one_line(
    words: str, message: str, capsys: Capture
) -> None:
    assert message in expect_error(capsys, *words.split(), status=2)


def test_a_missing_server_is_reported_in_one_line(
    server: ScriptedServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedServer(answer).run() as ended:
        url = ended.url
    message = expect_error(capsys, "--base-url", url)
    assert f"no server at {url}: start one with `mlxrunner serve`" in message


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [("MLXRUNNER_PORT", "0", "--port 0 selects any free port: name the server with --base-url")],
)
def test_settings_without_an_address_are_rejected(
    variable: str, value: str, message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert message in expect_error(capsys)


def test_the_command_does_not_import_mlx(server: ScriptedServer) -> None:
    code = (
        "import sys\nfrom app import cli\n"
        f"status = cli.main(['bench', '--base-url', {server.url!r}, '--num-prompts', '1'])\n"
        "assert status == 0\n"
        "assert not any(name.split('.')[0] == 'mlx' for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def read_end_token() -> int:
    """The end-of-sequence token of the built-in model, which has no text."""
    config = ROOT / "models" / "builtin" / "config.json"
    return json.loads(config.read_text())["eos_token_id"]


def test_the_real_server(capsys: Capture) -> None:
    """Prompts have about the requested length, a shared prefix is cached and unique prompts are
    not, and each response has all tokens."""

    def measure(url: str, *words: str) -> dict[str, float]:
        common = ["--base-url", url, "--max-concurrency", "2", "--num-prompts", "4"]
        assert run(*common, "--output-len", "12", "--json", *words) == 0
        return json.loads(capsys.readouterr().out)["servers"][0]["levels"][0]

    def check(level: dict[str, float], prompt: int, cached: Callable[[float], bool]) -> None:
        assert (level["completed"], level["total_output_tokens"]) == (4, 48)
        assert level["total_input_tokens"] == pytest.approx(4 * prompt, rel=0.15)
        assert cached(level["total_cached_tokens"] / level["total_input_tokens"])

    with run_thread_server(parallel=2) as server:
        check(measure(server.url), 128, lambda share: share < 0.3)
        prefix = ["--input-len", "60", "--random-prefix-len", "200"]
        check(measure(server.url, *prefix), 260, lambda share: share > 0.6)
        completions = ["--endpoint", "completions"]
        check(measure(server.url, *completions), 128, lambda share: share < 0.2)
        forced = json.dumps({"logit_bias": {str(read_end_token()): 100}})
        silent = measure(server.url, *completions, "--extra-body", forced)
        check(silent, 128, lambda share: share < 0.2)
        assert silent["median_tpot_ms"] is None


def test_a_server_without_usage_is_measured(capsys: Capture) -> None:
    """As llama-cpp-python's."""

    def script(exchange: ScriptedExchange) -> None:
        if exchange.body.get("stream"):
            exchange.send_stream([text_event("x"), finish_event("length"), DONE])
        else:
            answer(exchange)

    with ScriptedServer(script).run() as server:
        words = ["--max-concurrency", "1", "--num-prompts", "1", "--json", "--output-len", "7"]
        assert run("--base-url", server.url, *words) == 0
    [level] = json.loads(capsys.readouterr().out)["servers"][0]["levels"]
    assert (level["total_output_tokens"], level["total_input_tokens"]) == (7, None)
