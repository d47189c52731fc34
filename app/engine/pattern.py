"""How often a regular expression repeats something, at most.

Knows: the syntax of repetition and grouping. Must not know: what is matched, llguidance.
"""

import re

# one thing repeated so often takes a hundredth of a second for each token; ten times as often, and
# native code takes it for too complex in the middle of an answer
MAX_REPETITIONS = 10_000

_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\(|\)|\{(\d*)(,?)(\d*)\}", re.DOTALL)


def count_repetitions(pattern: str) -> int:
    """The largest product of bounded repetitions inside one another: 15 for `((ab){3}c){5}`. Of
    `{3,5}` and of `{,5}` the 5 counts, of `{3,}` the 3; `*` and `+` cost nothing."""
    # the product within each open group, and that of what was last closed or written
    groups, last, largest, end = [1], 1, 1, 0
    for part in _REGEX_PARTS.finditer(pattern):
        if part.start() > end:
            last = 1
        end = part.end()
        match part[0][0]:
            case "(":
                groups.append(1)
                continue
            case ")" if len(groups) > 1:
                last = groups.pop()
            case "{":
                count = part[3] or part[1]
                # what is written so long is larger than any limit
                last *= max(1, int(count[:9] or 0))
            case _:
                last = 1
                continue
        groups[-1] = max(groups[-1], last)
        largest = max(largest, last)
    return largest
