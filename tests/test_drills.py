"""Change drills: how many product files a typical change takes, tried in a copy of the sources.

Each drill writes its new files, inserts lines at anchors, runs a program that uses the change, and
counts the files that it touched. Only Python files under app/ and models/ count.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Drill:
    """new: path -> text of a new file. inserted: (path, anchor, lines before it). program: run in
    the copy; exits with 0 if the change works. max_files: that the change may touch."""

    new: Mapping[str, str]
    inserted: Sequence[tuple[str, str, str]]
    program: str
    max_files: int


STAGE = '''
"""Adds a constant to the logit of id 3 while `presence_penalty` is set."""

from app.engine.sampling.stage import StageInput


class FooState:
    group_key = True


class Foo:
    knobs = ("presence_penalty",)

    def create_state(self, sequence: StageInput) -> FooState:
        return FooState()

    def create_batch(self, states):
        return FooBatch()


class FooBatch:
    def apply(self, logits, step):
        logits[:, 3] += 100
        return logits

    def add(self, tokens, step):
        pass

    def release(self, num_draws):
        pass
'''

STAGE_PROGRAM = """
import mlx.core as mx
from app.core.sampling_params import SamplingParams
from app.engine.sampling.sampler import SamplerBatch, SamplerState

def draw(**knobs):
    sampling = SamplingParams(temperature=0.0, **knobs)
    state = SamplerState(sampling, seed=0, prompt=[0], vocab=8)
    return SamplerBatch([state]).sample(mx.arange(8)[None]).tokens.item()

assert draw() == 7
assert draw(presence_penalty=0.5) == 3
"""

KNOB_PROGRAM = """
from app.api.fields import Fields
from app.api.ollama_runner import parse
from app.api.openai.sampling import read_sampling
from app.core.sampling_params import SamplingParams

assert read_sampling(Fields({"foo": 0.5})) == {"foo": 0.5}
assert parse({"prompt": "x", "options": {"foo": 0.25}}, "m").sampling["foo"] == 0.25
assert SamplingParams.merge({"foo": 0.5}).foo == 0.5
"""

FLAG_PROGRAM = """
import subprocess, sys
help = subprocess.run(
    [sys.executable, "-m", "app", "serve", "--help-all"], capture_output=True, text=True
)
assert "--foo" in help.stdout, help
shown = subprocess.run(
    [sys.executable, "-m", "app", "config", "--foo", "7"], capture_output=True, text=True
)
assert shown.returncode == 0 and "foo" in shown.stdout, shown
"""

POLICY = '''
"""A policy that keeps one entry, as `single` does."""

from app.engine.prefix import single


def create_cache(config):
    return single.create_cache(config)
'''

POLICY_PROGRAM = """
from typing import get_args
from app.core.settings import CachePolicy
from app.engine.prefix.policy import PrefixCacheConfig, create_prefix_cache
from app.engine.prefix.single import SinglePrefixCache

assert "foo" in get_args(CachePolicy)
config = PrefixCacheConfig(
    make_kv=lambda **_: [],
    evaluate=print,
    dispatch=print,
    alignment=1,
    num_slots=1,
    context=8,
    multi_user=False,
)
assert isinstance(create_prefix_cache("foo", config), SinglePrefixCache)
"""

DIALECT = '''
"""Answers GET /foo with the name of the first model."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


def routes(generate, models, settings, bodies):
    async def foo(request: Request) -> Response:
        return PlainTextResponse(models.list_models()[0].id)

    return [Route("/foo", foo, methods=["GET"])]
'''

ROUTE_PROGRAM = """
import asyncio
import httpx
from app.core.settings import Settings
from tests.fakes import CARD, FakeGenerate, build_fake_app

async def main():
    transport = httpx.ASGITransport(build_fake_app(FakeGenerate(), Settings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.get("/foo")
        assert (reply.status_code, reply.text) == (200, CARD.id), reply

asyncio.run(main())
"""

ROUTE = """        Route("/foo", lambda _: Response(models.list_models()[0].id), methods=["GET"]),
"""

ARCHITECTURE = '''
"""Foo: Llama under another name."""

from models.llama import Config as LlamaConfig
from models.llama import Model as LlamaModel


class Config(LlamaConfig):
    pass


class Model(LlamaModel):
    pass
'''

ARCHITECTURE_PROGRAM = """
from models import architectures
from tests import tiny

model = architectures.build({**tiny.CONFIG, "model_type": "foo"}, tiny.weights())
assert type(model).__module__ == "models.foo", type(model)
"""

DRILLS = {
    "a sampler stage": Drill(
        new={"app/engine/sampling/foo.py": STAGE},
        inserted=[
            (
                "app/engine/sampling/sampler.py",
                "STAGES: tuple[Stage, ...] = (",
                "from app.engine.sampling.foo import Foo\n\n",
            )
        ],
        program=STAGE_PROGRAM,
        max_files=2,
    ),
    "a knob": Drill(
        new={},
        inserted=[
            (
                "app/core/sampling_params.py",
                "    seed: int | None = None\n",
                "    foo: float = 0.0\n",
            ),
            (
                "app/core/sampling_params.py",
                '    SamplingKnob(\n        name="seed",',
                '    SamplingKnob(name="foo", kind=float, low=0, high=1, doc="does foo"),\n',
            ),
        ],
        program=KNOB_PROGRAM,
        max_files=2,
    ),
    "a flag": Drill(
        new={},
        inserted=[
            ("app/core/settings.py", "    ping: float", "    foo: float = 5.0\n"),
            (
                "app/config/options.py",
                '            make_option(\n                "ping",',
                '            make_option("foo", value_types.duration(), "seconds of foo"),\n',
            ),
        ],
        program=FLAG_PROGRAM,
        max_files=2,
    ),
    "a prefix policy": Drill(
        new={"app/engine/prefix/foo.py": POLICY},
        inserted=[("app/core/settings.py", "CachePolicy = Literal[", "")],
        program=POLICY_PROGRAM,
        max_files=2,
    ),
    "a dialect": Drill(
        new={"app/api/foo.py": DIALECT}, inserted=[], program=ROUTE_PROGRAM, max_files=1
    ),
    "a route": Drill(
        new={},
        inserted=[("app/api/models.py", '        Route("/v1/models/load", load', ROUTE)],
        program=ROUTE_PROGRAM,
        max_files=2,
    ),
    "an architecture": Drill(
        new={"models/foo.py": ARCHITECTURE}, inserted=[], program=ARCHITECTURE_PROGRAM, max_files=1
    ),
}

# Changes of the anchor's line itself, which an insertion cannot do.
REPLACEMENTS = {
    "STAGES: tuple[Stage, ...] = (": "STAGES: tuple[Stage, ...] = (Foo(), ",
    "CachePolicy = Literal[": 'CachePolicy = Literal["foo", ',
}


@pytest.mark.parametrize("name", DRILLS)
def test_a_change_touches_few_files(name: str, tmp_path: Path) -> None:
    drill = DRILLS[name]
    ignore = shutil.ignore_patterns("__pycache__", "training", "src", "bench", "clients")
    for folder in ("app", "models", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    shutil.copy(ROOT / "openapi.yaml", tmp_path)
    for path, text in drill.new.items():
        (tmp_path / path).write_text(text.lstrip())
    for path, anchor, lines in drill.inserted:
        source = (tmp_path / path).read_text("utf-8")
        assert source.count(anchor) == 1, f"{path} has no single {anchor!r}"
        after = REPLACEMENTS.get(anchor, anchor)
        (tmp_path / path).write_text(source.replace(anchor, lines + after), "utf-8")
    touched = {*drill.new, *(path for path, _, _ in drill.inserted)}
    assert len(touched) <= drill.max_files
    process = subprocess.run(
        [sys.executable, "-c", drill.program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
