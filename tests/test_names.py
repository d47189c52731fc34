"""Names: one public name has one meaning, a function's name is a verb, and files stay readable."""

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain

import pytest

from tests.code_size import (
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    Module,
    iter_functions,
    load_modules,
)

# Irregular participles, except for those that are also present tense (read, set, put, cut, split).
IRREGULAR_PARTICIPLES = frozenset(
    [
        "begun",
        "bound",
        "broken",
        "brought",
        "built",
        "chosen",
        "done",
        "drawn",
        "driven",
        "fallen",
        "felt",
        "forgotten",
        "found",
        "given",
        "gone",
        "grown",
        "heard",
        "held",
        "hidden",
        "kept",
        "known",
        "laid",
        "left",
        "lent",
        "lost",
        "made",
        "meant",
        "met",
        "paid",
        "said",
        "seen",
        "sent",
        "shown",
        "slept",
        "sold",
        "spent",
        "spoken",
        "taken",
        "taught",
        "thought",
        "told",
        "understood",
        "won",
        "worn",
        "written",
    ]
)

# verbs that end like a participle
VERBS = frozenset({"embed", "feed", "need", "seed", "shed", "speed", "bring", "ping", "string"})


def is_bare_participle(name: str) -> bool:
    word = name.strip("_")
    if "_" in word or word in VERBS:
        return False
    return word in IRREGULAR_PARTICIPLES or bool(re.fullmatch(r"\w{2,}(ed|ing)", word))


def is_fixture(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_bare_participles_are_recognized():
    assert all(map(is_bare_participle, ("told", "found", "_compiling", "merged")))
    assert not any(map(is_bare_participle, ("embed", "feed", "load", "load_merged", "read")))


@pytest.fixture(scope="module")
def modules() -> Mapping[str, Module]:
    return load_modules()


def test_no_module_level_function_has_a_bare_participle_as_its_name(modules):
    named = [
        f"{module.path}: {node.name}"
        for module in [*modules.values(), *load_modules("tests").values()]
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and is_bare_participle(node.name)
        and not is_fixture(node)
    ]
    assert named == []


# The loader of plug-ins looks for these names.
PLUGIN_CLASSES = frozenset({"Config", "Family", "Model"})

# As in mlx-lm, each architecture has its own version of these, with one meaning.
LAYER_CLASSES = frozenset({"Attention", "Block", "CausalLM", "MLP", "MoE"})


def test_no_public_class_name_has_two_meanings(modules):
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        exempt = PLUGIN_CLASSES
        if module.path.startswith("models/"):
            exempt = exempt | LAYER_CLASSES
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_" and node.name not in exempt:
                places[node.name].append(module.path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_file_and_no_function_is_too_long(modules):
    files = [module.path for module in modules.values() if module.lines > MAX_FILE_LINES]
    functions = [
        f"{module.path}: {name}"
        for module in modules.values()
        for name, lines in iter_functions(module)
        if lines > MAX_FUNCTION_LINES
    ]
    assert list(chain(files, functions)) == []
