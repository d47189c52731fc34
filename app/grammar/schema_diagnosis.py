"""Finds the keyword of a JSON Schema that is not supported.

Knows: the search. Must not know: llguidance, the reasons for rejections, which the caller's
function reports.

llguidance reports the reason for a rejection, but not the position of the keyword. Parts of the
schema are therefore checked separately. The search descends into the first rejected child until no
child is rejected. Then each keyword of the remaining schema is checked twice: the keyword on its
own, and the schema without the keyword. Sibling schemas are checked together and bisected, so the
cost grows only logarithmically with the width of the schema.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import quote

from app.grammar.schema import (
    Schema,
    SchemaPath,
    UnsupportedGrammarError,
    iter_subschemas,
    resolve_pointer,
)

# returns the reason why a document is rejected, or None
SchemaCheck = Callable[[Schema], str | None]

# The maximum number of compilations of one search, and of seconds of CPU time. After either limit,
# the search reports the best result so far. Elapsed time is not limited: compilation has a lower
# priority than generation, so that a busy server would report a less exact path than an idle one.
_MAX_TRIALS = 200
_CPU_SECONDS = 1.0

# keywords whose presence changes the meaning of other keywords
_CONTEXT_KEYWORDS = frozenset({"type", "properties", "items", "prefixItems", "anyOf", "$ref"})
# keywords without constraints
_ANNOTATION_KEYWORDS = frozenset({"$defs", "definitions", "title", "description", "default"})


def find_unsupported_keyword(
    document: Schema, check: SchemaCheck, reason: str
) -> UnsupportedGrammarError:
    """Returns an error for the unsupported keyword, with the reason why the keyword on its own is
    rejected. document: a rejected document. reason: the reason for its rejection, used if no
    smaller part is rejected."""
    return _Search(document, check).find((), document, reason)


class _LimitReached(Exception):
    pass


class _Search:
    def __init__(self, document: Schema, check: SchemaCheck) -> None:
        self._document = document
        self._check = check
        self._relocated_document: Any = None
        self._trials = 0
        self._deadline = time.thread_time() + _CPU_SECONDS
        self._seen: set[SchemaPath] = set()

    def find(self, path: SchemaPath, schema: Any, reason: str) -> UnsupportedGrammarError:
        """Searches the schema at `path`, which is rejected for `reason`."""
        self._seen.add(path)
        self._relocated_document = self._relocate(self._document)
        try:
            child = self._find_rejected_child(path, schema)
            if child is None:
                return self._find_keyword(path, schema, reason)
        except _LimitReached:
            return UnsupportedGrammarError(reason, path)
        child_path, rejected, why = child
        return self.find(child_path, rejected, why)

    def _find_rejected_child(
        self, path: SchemaPath, schema: Any
    ) -> tuple[SchemaPath, Any, str] | None:
        """Returns the first child that is rejected on its own."""
        # the schema `false` rejects everything by design
        below = [child for child in iter_subschemas(schema) if child[1] is not False]
        children = [((*path, *names), child_schema) for names, child_schema in below]
        if isinstance(schema, dict) and isinstance(cast(Schema, schema).get("$ref"), str):
            target = resolve_pointer(self._document, cast(Schema, schema)["$ref"])
            children += [target] if target is not None else []
        children = [child for child in children if child[0] not in self._seen]
        reason = self._try_together(children)
        if reason is None:
            return None
        while len(children) > 1:
            half = len(children) // 2
            first = self._try_together(children[:half])
            children = children[half:] if first is None else children[:half]
        path, target = children[0]
        reason = self._try_together(children)
        return None if reason is None else (path, target, reason)

    def _try_together(self, children: Sequence[tuple[SchemaPath, Any]]) -> str | None:
        """Returns the reason why these schemas are rejected together, or None if they are
        accepted."""
        if not children:
            return None
        refs = {str(i): {"$ref": _reference_to(path)} for i, (path, _) in enumerate(children)}
        if len(refs) == 1:
            return self._try(refs["0"])
        beside = {"type": "object", "properties": refs, "required": list(refs)}
        return self._try({**beside, "additionalProperties": False})

    def _try(self, schema: Schema) -> str | None:
        self._trials += 1
        if self._trials > _MAX_TRIALS or time.thread_time() > self._deadline:
            raise _LimitReached
        return self._check({**schema, "$defs": {"whole": self._relocated_document}})

    def _find_keyword(self, path: SchemaPath, schema: Any, reason: str) -> UnsupportedGrammarError:
        """Finds the keyword in the schema itself, not in its children."""
        if not isinstance(schema, dict):
            return UnsupportedGrammarError(reason, path)
        mapping = cast(Schema, self._relocate(schema))
        keywords = [key for key in mapping if key not in _ANNOTATION_KEYWORDS]
        for key in keywords:
            rejection = self._try({key: mapping[key]})
            if rejection is not None:
                return UnsupportedGrammarError(rejection, (*path, key))
        # try constraints before the keywords whose values they constrain
        for key in sorted(keywords, key=lambda key: key in _CONTEXT_KEYWORDS):
            remaining = {name: mapping[name] for name in keywords if name != key}
            if self._try(remaining) is None:
                return UnsupportedGrammarError(reason, (*path, key))
        return UnsupportedGrammarError(reason, path)

    def _relocate(self, value: Any) -> Any:
        """Returns the value with its references rewritten for one level down, so that other
        documents can refer to its parts. References to a schema that the search has already entered
        are dropped. Otherwise every schema with such a reference would be rejected for the same
        reason."""
        if isinstance(value, list):
            return [self._relocate(item) for item in cast(list[Any], value)]
        if not isinstance(value, dict):
            return value
        mapping = cast(Schema, value)
        ref = mapping.get("$ref")
        moved = {key: self._relocate(item) for key, item in mapping.items()}
        if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
            moved["$ref"] = f"#/$defs/whole{ref[1:]}"
            target = resolve_pointer(self._document, ref)
            if target is not None and target[0] in self._seen:
                del moved["$ref"]
        return moved


def _reference_to(path: SchemaPath) -> str:
    spelled = (quote(name.replace("~", "~0").replace("/", "~1")) for name in path)
    return "/".join(("#/$defs/whole", *spelled))
