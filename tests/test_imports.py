"""Every module can be imported, without a warning, by each supported Python."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def list_modules() -> list[str]:
    files = [
        path.relative_to(ROOT) for name in ("app", "models") for path in (ROOT / name).rglob("*.py")
    ]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    # training needs JAX, which has an environment of its own
    return sorted(
        name
        for name in names
        if not name.startswith("models.builtin.training") and not name.endswith("__main__")
    )


def test_every_module_can_be_imported() -> None:
    names = list_modules()
    assert len(names) > 300
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")
