"""Prints the Homebrew formula of a release.

    python deploy/homebrew/formula.py OWNER/REPOSITORY dist/mlxrunner-0.1.0.tar.gz

Knows: the lines of mlxrunner.rb that differ between releases. Must not know: Homebrew.
"""

import hashlib
import re
import sys
from pathlib import Path

_FORMULA = Path(__file__).with_name("mlxrunner.rb")


def render(repository: str, archive: Path) -> str:
    """Returns the formula for the archive of the sources, which is attached to the release."""
    version = archive.name.removeprefix("mlxrunner-").removesuffix(".tar.gz")
    page = f"https://github.com/{repository}"
    values = {
        "homepage": page,
        "url": f"{page}/releases/download/v{version}/{archive.name}",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }
    # the comment describes the formula in the source tree
    text = re.sub(r"\A(#.*\n)+", "", _FORMULA.read_text("utf-8"))
    for name, value in values.items():
        text, count = re.subn(rf'(?m)^(  {name}) ".*"$', rf'\1 "{value}"', text)
        assert count == 1, name
    return text


if __name__ == "__main__":
    print(render(sys.argv[1], Path(sys.argv[2])), end="")
