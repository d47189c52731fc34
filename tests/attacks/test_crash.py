"""A prompt that crashes the model process, while clients in several processes send other
prompts."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests import tiny
from tests.attacks.attacker import Attack, Read, Send
from tests.attacks.conftest import attack_in_processes
from tests.http import raw_client
from tests.server_process import TIMEOUT, ServerProcess, run_server

COMPLETIONS = "/v1/completions"
NEVER_ENDS = {"logit_bias": {str(tiny.END): -100}}
CRASHING = {"model": "long", "prompt": "crash", "max_tokens": 19_000, "stream": True, **NEVER_ENDS}
OTHER = {"model": "long", "prompt": "x", "max_tokens": 8, **NEVER_ENDS}


def crash_while_it_runs(server: ServerProcess) -> str:
    """Kills the model process as a fault would, while it generates. Returns the rest of the
    answer."""
    with httpx.stream("POST", server.url + COMPLETIONS, json=CRASHING, timeout=TIMEOUT) as reply:
        assert reply.status_code == 200
        chunks = reply.iter_text()
        next(chunk for chunk in chunks if '"text"' in chunk)  # pings come before
        models: Any = server.status()["Models"]
        os.kill(models[0]["Pid"], signal.SIGSEGV)
        return "".join(chunks)


def test_only_what_was_running_fails_and_two_crashes_refuse_the_prompt(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "long", max_position_embeddings=20_000)
    # a prompt that ran during both crashes would also be refused
    others = [{**OTHER, "prompt": f"x{number}"} for number in range(1000)]
    connections = [[Send(raw_client.post(one, COMPLETIONS)), Read()] for one in others]
    with run_server(str(folder), "--parallel", "2") as server:
        with attack_in_processes(Attack(connections, threads=3, port=server.port)) as counts:
            for _ in range(2):
                rest = crash_while_it_runs(server)
                assert '"error"' in rest
            again = {**CRASHING, "stream": False}
            refused = httpx.post(server.url + COMPLETIONS, json=again, timeout=TIMEOUT)
            assert refused.status_code == 400, refused.text[:300]
            assert refused.json()["error"]["code"] == "prompt_refused"
        assert set(counts.statuses) <= {"200", "500"}
        # two slots: each crash ends at most one of them
        assert counts.statuses["500"] <= 2
        assert counts.statuses["200"] > 2
        reply = httpx.post(server.url + COMPLETIONS, json=OTHER, timeout=TIMEOUT)
        assert reply.status_code == 200
