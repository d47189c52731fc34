"""The programs of docs/extending.md: the new modules are imported under their names, and their
tests pass. The tables below have the names that a fragment uses."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.manual.blocks import read_blocks
from tests.server_process import ROOT, TIMEOUT, UNTRACED

pytestmark = pytest.mark.manual

PAGE = "docs/extending.md"

# Modules of the packages may also be in the folder of the test.
CONFTEST = '''
import importlib
from pathlib import Path

import app.api.app
import app.engine.prefix
import app.store
import app.text.families
import models
from tests.api.conftest import call, generate
from tests.text.conftest import files
import pytest
from hypothesis import HealthCheck, settings

# Slow machines may take a second for one text.
settings.register_profile(
    "page", derandomize=True, deadline=None, max_examples=20,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("page")

for package in (app.api, app.engine.prefix, app.store, app.text.families, models):
    name = package.__name__
    package.__path__.append(str(Path(__file__).parent / name))

find_dialects = app.api.app._find_dialects
app.api.app._find_dialects = lambda: [*find_dialects(), importlib.import_module("app.api.foo")]


@pytest.fixture
def transcript():
    """Instead of a committed file: the text of the stream."""

    def check(name, body):
        assert name.endswith(".sse")
        assert [line for line in body.decode().splitlines() if line] == [
            "data: Hel", "data: lo", "data: [DONE]"
        ]

    return check
'''

# A dialect that answers as the page's test expects; the page describes it in words.
DIALECT = """
from starlette.responses import StreamingResponse
from starlette.routing import Route

from app.core.events import TextDelta
from app.core.requests import GenerateRequest


def routes(generate, models, settings, bodies):
    async def chat(request):
        body = await request.json()
        model = await models.resolve(body["model"])

        async def stream():
            request = GenerateRequest(model=body["model"], prompt=body["prompt"])
            async with generate.open(request, model) as events:
                async for batch in events:
                    for event in batch:
                        if isinstance(event, TextDelta):
                            yield f"data: {event.text}\\n\\n"
            yield "data: [DONE]\\n\\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    return [Route("/foo/chat", chat, methods=["POST"])]
"""

FAMILY_IMPORTS = """
from hypothesis import given, settings, strategies as st
from app.grammar.constraint import ReasoningTags
from app.text.families.foo import Family
from tests.text.families.reading import Call, check_prose, check_text, collect_calls, join_content
from tests.text.families.reading import mixtures
from tests.text.families.tagged import TOOLS
from tests.text.families.walking import check_walks
from tests.text.templates import WEATHER
"""

DISTRIBUTION_TEST = """
import numpy as np

P = np.array([0.5, 0.25, 0.125, 0.125])


def foo_by_definition(p, foo):
    return np.where(p >= foo, p, 0)
"""

DISTRIBUTION_CHECK = """
def test_a_row_has_parameters_and_a_distribution():
    [(parameters, expected)] = DISTRIBUTIONS
    assert parameters == {"foo": 0.3}
    assert expected.shape == P.shape
"""

TEMPLATE_IMPORTS = """
from app.core.requests import Message
from app.text.chat_template import ChatTemplate

FOO = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""

SOURCE_IMPORTS = """
import pytest
from app.core.errors import AppError, ErrorKind
from app.store import foo
"""


@dataclass(frozen=True, slots=True)
class Program:
    """start: of the block. file: to which it is written. before, after: the text around it in this
    file."""

    start: str
    file: str
    before: str = ""
    after: str = ""


PROGRAMS = (
    Program('"""Foo (Author', "models/foo.py"),
    Program('"""The Foo architecture."""', "test_architecture.py"),
    Program(
        "def test_a_stream_is_framed",
        "test_dialect.py",
        "from tests.fakes import CARD, finish, text\n",
    ),
    Program("import pytest\n\nfrom app.engine.prefix.foo", "test_policy.py"),
    Program("DISTRIBUTIONS", "test_stage.py", DISTRIBUTION_TEST, DISTRIBUTION_CHECK),
    Program('"""Foo\'s calls', "app.text.families/foo.py"),
    Program("FAMILY = Family()", "test_family.py", FAMILY_IMPORTS),
    Program("def test_foo_renders", "test_template.py", TEMPLATE_IMPORTS),
    Program("def test_a_folder_without", "test_source.py", SOURCE_IMPORTS),
)

# Modules that the page describes in words only.
OTHER_FILES = {
    "conftest.py": CONFTEST,
    "app.api/foo.py": DIALECT,
    "app.engine.prefix/foo.py": "from app.engine.prefix.single import SinglePrefixCache\n"
    "FooPrefixCache = SinglePrefixCache\n",
    "app.store/foo.py": "from app.store.hf_folder import read as read\n",
}

# The tests that are shared by all policies take seconds, and one shows that they are found.
CHOSEN = "not test_policy or a_committed_prefix_is_reused"


def test_the_programs_of_the_page_work(tmp_path: Path) -> None:
    blocks = [block for block in read_blocks(PAGE) if block.language == "python"]
    files = dict(OTHER_FILES)
    for block in blocks:
        known = [program for program in PROGRAMS if block.text.startswith(program.start)]
        assert len(known) == 1, f"{block}: a row of PROGRAMS must say where this program belongs"
        files[known[0].file] = f"{known[0].before}\n{block.text}\n{known[0].after}"
    assert len(blocks) == len(PROGRAMS), "PROGRAMS has a row for which there is no block"
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", CHOSEN, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, **UNTRACED, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    [count] = re.findall(r"^(\d+) passed", process.stdout, re.MULTILINE)
    assert int(count) >= 9
