"""openapi.yaml, parsed once per process."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

_PATH = Path(__file__).parents[1] / "openapi.yaml"
# libyaml takes a tenth of the time of PyYAML's own parser, which takes two seconds here
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def read_openapi() -> Any:
    """Returns the document, which is shared: copy it before changing it."""
    return yaml.load(_PATH.read_text("utf-8"), _LOADER)
