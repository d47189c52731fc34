"""A pytest plugin for llama.cpp's own server tests: its process class starts our server instead.

Knows: the attributes of llama.cpp's process class (tools/server/tests/utils.py), our flags and
files. Must not know: the tests. Nothing else of llama.cpp's tests is replaced, except that no
models are downloaded: the model is stories260K of ../shared/data.

pytest runs in llama.cpp's folder of tests, with `-p tests.clients.llamacpp.plugin`.
"""

import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import httpx
from requests.structures import CaseInsensitiveDict

from tests.clients.llamacpp.entry import serve
from tests.clients.llamacpp.shared_names import MODEL, RESULTS_VARIABLE
from tests.clients.llamacpp.templates import NAMED_TEMPLATES

# The names of models in the requests of the tests. llama.cpp ignores the name; here they are names
# of the one model.
FOREIGN_NAMES = (
    "codellama70b",
    "davinci-002",
    "gpt-3.5-turbo",
    "gpt-3.5-turbo-instruct",
    "gpt-4.1",
    "test",
    "text-embedding-3-small",
)

# llama.cpp's sampler without options, in the terms of generation_config.json
SAMPLING = {"do_sample": True, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

# The processes fork from one that has imported the server, because its import takes most of its
# start.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.clients.llamacpp.entry", "app.server", "mlx.core"])


def _load_upstream() -> Any:
    """Imports llama.cpp's utils.py. Its only use of `wget` is to download models."""
    sys.modules.setdefault("wget", types.ModuleType("wget"))
    sys.path.insert(0, os.getcwd())
    import utils  # pyright: ignore[reportMissingImports]  # llama.cpp's, in the working directory

    return utils


utils = _load_upstream()


class OurServerProcess(utils.ServerProcess):
    """llama.cpp's process class with our server: `start` and `stop` are ours."""

    def start(self, timeout_seconds: float = 60.0) -> None:
        self.server_port = _find_free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="llamacpp-"))
        self._log_file = self.log_path or str(self._folder / "log.txt")
        self.process = PROCESSES.Process(
            target=serve, args=(self._build_arguments(), self._build_environ(), self._log_file)
        )
        self.process.start()
        utils.server_instances.add(self)
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end:
            try:
                if httpx.get(self.make_url("/health"), timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if not self.process.is_alive():
                raise RuntimeError(f"the server ended: {Path(self._log_file).read_text()}")
            time.sleep(0.02)
        raise TimeoutError(Path(self._log_file).read_text())

    def stop(self) -> None:
        utils.server_instances.discard(self)
        if self.process is None:
            return
        self.process.kill()
        self.process.join()
        print("\n--- the server's log ---\n" + Path(self._log_file).read_text()[-3000:])
        self.process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def make_request(self, *arguments: Any, **options: Any) -> Any:
        """Like llama.cpp's, which reads header names in the case that its own server uses."""
        response = super().make_request(*arguments, **options)
        response.headers = CaseInsensitiveDict(response.headers)
        return response

    def _build_environ(self) -> dict[str, str]:
        return {} if self.api_key is None else {"MLXRUNNER_API_KEY": self.api_key}

    def _build_arguments(self) -> list[str]:
        config = self._folder / "server.toml"
        config.write_text(self._build_config())
        arguments = ["--config", str(config), "--runner", "thread", "--drain", "1s"]
        arguments += ["--host", self.server_host, "--port", str(self.server_port)]
        context = self.n_ctx or 512
        if self.n_slots and not self.kv_unified:
            context //= self.n_slots  # llama.cpp divides its context among its slots
        arguments += ["--context", str(context)]
        if self.n_slots:
            arguments += ["--parallel", str(self.n_slots)]
        if self.n_batch:
            arguments += ["--prefill-chunk", str(self.n_batch)]
        if self.enable_ctx_shift:
            arguments += ["--context-shift", "--cache", "slots"]
        if self.debug:
            arguments.append("--debug")
        if self.api_key and not (self.cors_origins or self.server_tools):
            arguments += ["--cors-origin", "*"]  # llama.cpp's default
        if self.sleep_idle_seconds is not None:
            arguments += ["--keep-alive", f"{self.sleep_idle_seconds}s"]
        return arguments

    def _build_config(self) -> str:
        names = (self.model_alias or "tinyllama-2").split(",")
        names = [*sorted(names), *FOREIGN_NAMES]
        lines = ["[[models]]", f"name = {json.dumps(str(self._build_model()))}"]
        lines += [f"alias = {json.dumps(names[0])}", f"aliases = {json.dumps(names[1:])}"]
        return "\n".join(lines) + "\n"

    def _build_model(self) -> Path:
        """Returns a folder with the model, the template and the sampling of the settings."""
        folder = self._folder / "stories260K.gguf"
        folder.mkdir()
        for file in MODEL.iterdir():
            if file.is_file():
                (folder / file.name).symlink_to(file)
        config = json.loads((MODEL / "config.json").read_text())
        config["max_position_embeddings"] = max(512, self.n_ctx or 0)
        _replace(folder / "config.json", json.dumps(config))
        generation = json.loads((MODEL / "generation_config.json").read_text())
        generation |= SAMPLING | {"temperature": self.temperature, "seed": self.seed}
        _replace(folder / "generation_config.json", json.dumps(generation))
        (folder / "chat_template.jinja").write_text(self._read_template())
        return folder

    def _read_template(self) -> str:
        if self.chat_template_file:
            source = Path(self.chat_template_file).read_text()
        else:
            name = self.chat_template or "chatml"
            source = NAMED_TEMPLATES.get(name, name)
        # llama.cpp has an option for the default; here, templates have defaults
        thinks = "false" if self.reasoning == "off" else "true"
        default = "{%- if enable_thinking is not defined %}{%- set enable_thinking = "
        return f"{default}{thinks} %}}{{%- endif %}}{source}"


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _replace(file: Path, text: str) -> None:
    file.unlink()
    file.write_text(text)


def _load_no_models() -> None:
    """llama.cpp starts a server for each model once, to download it."""


utils.ServerProcess = OurServerProcess
utils.ServerPreset.load_all = staticmethod(_load_no_models)


def pytest_runtest_logreport(report: Any) -> None:
    """Appends the outcome of a test to the file in RESULTS_VARIABLE, as a JSON line."""
    file = os.environ.get(RESULTS_VARIABLE)
    if file and (report.when == "call" or report.outcome != "passed"):
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(report.longrepr) if crash is None else crash.message
        line = {"test": report.nodeid, "outcome": report.outcome, "reason": reason[:500]}
        with Path(file).open("a") as results:
            results.write(json.dumps(line) + "\n")
