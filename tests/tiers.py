"""The tiers of tests, for pytest's option `--tier`: each is an expression of markers.

Knows: the markers of pyproject.toml. Must not know: which tests have them. It needs only the
standard library.
"""

_NEVER_BY_DEFAULT = "gpu or exhaustive or network or programs"

TIERS = {
    # what `make test` runs: no process, less than a second of CPU time
    "unit": f"not (integration or timing or manual or {_NEVER_BY_DEFAULT})",
    "integration": f"integration and not (timing or manual or {_NEVER_BY_DEFAULT})",
    # both of them, for coverage and mutants
    "blocking": f"not (timing or manual or {_NEVER_BY_DEFAULT})",
    "timing": f"timing and not ({_NEVER_BY_DEFAULT})",
    "manual": f"manual and not ({_NEVER_BY_DEFAULT})",
    "programs": "programs and not network",
    "exhaustive": "exhaustive and not (gpu or network)",
}
