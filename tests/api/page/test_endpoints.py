"""The files of the page: who may read which file, the security headers, and the content that is
allowed in the files."""

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from app.api.page.endpoints import MEDIA_TYPES, STATIC
from tests.rows import rows
from tests.server_process import ROOT

HTML = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
VENDORED = sorted(STATIC.glob("vendor*"))
FILES = sorted({*STATIC.iterdir()} - {*VENDORED})
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
PAGES = sorted(STATIC.glob("*.html"))

# a page that loads immediately and is readable
MAX_BYTES = 200 * 1024
# most of it is loaded only for formulas and code
MAX_VENDORED_BYTES = 450 * 1024


def test_a_browser_gets_the_page_and_other_clients_the_text(call: Any):
    page = call("GET", "/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.body == (STATIC / "index.html").read_bytes()
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}, {"accept": "text/*"}):
        text = call("GET", "/", headers=accept)
        assert text.body == b"Ollama is running"
        assert "Accept" in text.headers["vary"]
    assert "Accept" in page.headers["vary"], "a cache would give a client the other one"


@rows(
    "path", ["/", "/docs", "/openapi.yaml", *(f"/page/{file.name}" for file in (*FILES, *VENDORED))]
)
def test_every_file_has_the_security_headers(call: Any, path: str):
    reply = call("GET", path, headers=HTML)
    assert reply.status == 200
    policy = dict(
        part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["x-frame-options"] == "DENY"
    assert reply.headers["cache-control"] == "no-cache"
    assert call("HEAD", path, headers=HTML).status == 200


def test_an_unchanged_file_is_not_sent_again(call: Any):
    first = call("GET", "/page/app.js")
    again = call("GET", "/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert again.headers["content-security-policy"]
    other = call("GET", "/page/chat.js", headers={"if-none-match": first.headers["etag"]})
    assert other.status == 200


@pytest.mark.parametrize(
    "name", ["nothing.js", "", "..", "../endpoints.py", "..%2fendpoints.py", "endpoints.py", "%00"]
)
def test_only_the_files_of_the_page_are_served(call: Any, name: str):
    assert call("GET", f"/page/{name}").status == 404


def test_the_schema_is_the_one_of_the_repository(call: Any):
    assert call("GET", "/openapi.yaml").body == (ROOT / "openapi.yaml").read_bytes()


def test_all_files_together_are_small():
    assert sum(file.stat().st_size for file in FILES) <= MAX_BYTES
    assert sum(file.stat().st_size for file in VENDORED) <= MAX_VENDORED_BYTES
    assert {file.suffix for file in (*FILES, *VENDORED)} <= set(MEDIA_TYPES)


def test_every_library_has_its_version_its_hashes_and_its_licence():
    """A modified file would differ from the one in the package."""
    document = tomllib.loads((STATIC / "vendored.toml").read_text("utf-8"))
    licences = (STATIC / "vendored.txt").read_text("utf-8")
    recorded: dict[str, str] = {}
    for library in document["library"]:
        assert library["integrity"].startswith("sha512-")
        assert f"{library['name']} {library['version']} ({library['licence']})" in licences
        recorded |= {file["name"]: file["sha256"] for file in library["files"]}
    assert recorded == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in VENDORED
        if file.suffix == ".js"
    }


@rows("file", FILES, ids=lambda file: file.name)
def test_nothing_is_loaded_from_another_server(file: Path):
    text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:src|href|from|url|import|fetch)\W{1,3}(?:https?:)?//", text)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_a_page_has_no_inline_script_and_no_inline_style(file: Path):
    text = file.read_text("utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
    for attributes, content in re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL):
        assert "src=" in attributes
        assert not content.strip()
    named = re.findall(r'(?:src|href)="/page/([^"]+)"', text)
    assert named
    assert set(named) <= {one.name for one in STATIC.iterdir()}


@rows("file", SCRIPTS, ids=lambda file: file.name)
def test_a_script_never_parses_html_and_imports_only_files_of_the_page(file: Path):
    text = file.read_text("utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|"
        r"setHTML|createContextualFragment|srcdoc",
        text,
    )
    imported = re.findall(r'from "\./([^"]+)"', text)
    assert text.count("import ") >= len(imported)
    assert {STATIC / name for name in imported} <= {*SCRIPTS, *VENDORED}
