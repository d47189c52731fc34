"""`python -m tests.metadata`: describes the sources in this Python's environment as an installed
package, so that they know their version. Unlike an installation it compiles nothing.

Knows: pyproject.toml, importlib.metadata. Must not know: what the tests test.
"""

import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_metadata(packages: Path) -> None:
    """packages: the folder of the environment's packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    folder = packages / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    lines = ("Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}")
    (folder / "METADATA").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    # an installation later removes what is recorded
    record = (f"{folder.name}/{name},,\n" for name in ("METADATA", "RECORD"))
    (folder / "RECORD").write_text("".join(record), "utf-8")


if __name__ == "__main__":
    write_metadata(Path(sysconfig.get_path("purelib")))
