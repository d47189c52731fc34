"""Which keyword of a JSON Schema is the one that cannot be followed.

Knows: the search. Must not know: llguidance, what a refusal rests on; whoever calls brings a
function that says of any document whether it is refused.

llguidance says why, but not where. So parts of the schema are tried by themselves: the first child
that is refused is gone into, until no child is; then the keywords of what is left are tried, each
alone and each left out. Children beside one another are tried together, and halved as long as they
are refused, so that a wide schema costs the logarithm of its width.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import quote

from app.engine.schema import Path, Refused, Schema, at, evaluated

# the reason why a document is refused, or None
Refusal = Callable[[Schema], str | None]

# compilations of one search, and seconds after which it names what it has found so far
_MOST_TRIALS = 200
_PATIENCE = 1.0

# keywords that others are read beside
_BROAD = frozenset({"type", "properties", "items", "prefixItems", "anyOf", "$ref"})
# keywords that forbid nothing
_SILENT = frozenset({"$defs", "definitions", "title", "description", "default"})


def fault(document: Schema, refusal: Refusal, reason: str) -> Refused:
    """The keyword to blame, and the reason that is given for it alone. document: it is refused, for
    `reason`, which is given where nothing smaller is."""
    return _Search(document, refusal).within((), document, reason)


class _OutOfPatience(Exception):
    pass


class _Search:
    def __init__(self, document: Schema, refusal: Refusal) -> None:
        self._document = document
        self._refusal = refusal
        self._whole: Any = None
        self._trials = 0
        self._deadline = time.monotonic() + _PATIENCE
        self._seen: set[Path] = set()

    def within(self, path: Path, schema: Any, reason: str) -> Refused:
        """schema: at `path`, refused for this reason."""
        self._seen.add(path)
        self._whole = self._moved(self._document)
        try:
            child = self._child(path, schema)
            if child is None:
                return self._keyword(path, schema, reason)
        except _OutOfPatience:
            return Refused(reason, path)
        below, found, why = child
        return self.within(below, found, why)

    def _child(self, path: Path, schema: Any) -> tuple[Path, Any, str] | None:
        """The first that is refused by itself."""
        # false forbids all, which is what it is for
        below = [child for child in evaluated(schema) if child[1] is not False]
        children = [((*path, *names), each) for names, each in below]
        if isinstance(schema, dict) and isinstance(cast(Schema, schema).get("$ref"), str):
            found = at(self._document, cast(Schema, schema)["$ref"])
            children += [found] if found is not None else []
        children = [child for child in children if child[0] not in self._seen]
        reason = self._refused(children)
        if reason is None:
            return None
        while len(children) > 1:
            half = len(children) // 2
            first = self._refused(children[:half])
            children = children[half:] if first is None else children[:half]
        path, found = children[0]
        reason = self._refused(children)
        return None if reason is None else (path, found, reason)

    def _refused(self, children: Sequence[tuple[Path, Any]]) -> str | None:
        """Why not all of them can be followed beside each other."""
        if not children:
            return None
        refs = {str(i): {"$ref": _pointer(path)} for i, (path, _) in enumerate(children)}
        if len(refs) == 1:
            return self._try(refs["0"])
        beside = {"type": "object", "properties": refs, "required": list(refs)}
        return self._try({**beside, "additionalProperties": False})

    def _try(self, schema: Schema) -> str | None:
        self._trials += 1
        if self._trials > _MOST_TRIALS or time.monotonic() > self._deadline:
            raise _OutOfPatience
        return self._refusal({**schema, "$defs": {"whole": self._whole}})

    def _keyword(self, path: Path, schema: Any, reason: str) -> Refused:
        """It is in what this schema says itself."""
        if not isinstance(schema, dict):
            return Refused(reason, path)
        held = cast(Schema, self._moved(schema))
        said = [key for key in held if key not in _SILENT]
        for key in said:
            alone = self._try({key: held[key]})
            if alone is not None:
                return Refused(alone, (*path, key))
        # what narrows is rather to blame than what it narrows
        for key in sorted(said, key=lambda key: key in _BROAD):
            others = {name: held[name] for name in said if name != key}
            if self._try(others) is None:
                return Refused(reason, (*path, key))
        return Refused(reason, path)

    def _moved(self, value: Any) -> Any:
        """One level down, so that parts of it can be referred to from outside. What refers to a
        schema that the search is within says nothing: else all that refers to it would be blamed
        for what is wrong with it."""
        if isinstance(value, list):
            return [self._moved(each) for each in cast(list[Any], value)]
        if not isinstance(value, dict):
            return value
        held = cast(Schema, value)
        ref = held.get("$ref")
        moved = {key: self._moved(each) for key, each in held.items()}
        if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            moved["$ref"] = f"#/$defs/whole{ref[1:]}"
            found = at(self._document, ref)
            if found is not None and found[0] in self._seen:
                del moved["$ref"]
        return moved


def _pointer(path: Path) -> str:
    spelled = (quote(name.replace("~", "~0").replace("/", "~1")) for name in path)
    return "/".join(("#/$defs/whole", *spelled))
