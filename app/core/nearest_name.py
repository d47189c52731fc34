"""Finds the known name that is most similar to a mistyped one.

Knows: the similarity of words. Must not know: what the names stand for.
"""

import difflib
from collections.abc import Iterable

# a shorter word could be the beginning of too many names
_MIN_PREFIX_LENGTH = 3


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """ "; did you mean …?", or "" if no known name is similar to `word`. prefix: with which all
    names begin; it is not compared, because it would make all names similar."""
    found = find_nearest(word, known, prefix)
    return f"; did you mean {found}?" if found else ""


def find_nearest(word: str, known: Iterable[str], prefix: str = "") -> str | None:
    """Returns the most similar name, or the only name that begins with `word`, or None. Upper case,
    `_` and `-` make no difference."""
    by_key = {_normalize(name, prefix): name for name in known}
    key = _normalize(word, prefix)
    close = difflib.get_close_matches(key, by_key, n=1)
    if close:
        return by_key[close[0]]
    begin = [name for name in by_key if name.startswith(key) and len(key) >= _MIN_PREFIX_LENGTH]
    return by_key[begin[0]] if len(begin) == 1 else None


def _normalize(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("_", "-").lstrip("-")
