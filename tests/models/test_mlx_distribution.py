"""The distribution that MLX's library comes from, in environments with one, two or damaged ones."""

import base64
import hashlib
import sys
from pathlib import Path

import pytest

from models.mlx_distribution import MlxDistribution, find_mlx_distribution


def install(folder: Path, name: str, content: bytes) -> None:
    """Installs a distribution as pip does: over the files of the others, with a record."""
    library = folder / "mlx" / "lib" / "libmlx.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(content)
    info = folder / f"{name.replace('-', '_')}-0.32.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.4\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"mlx/lib/libmlx.so,sha256={digest},{len(content)}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of packages."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_the_only_distribution_is_found(packages: Path) -> None:
    install(packages, "mlx-metal", b"metal")
    assert str(find_mlx_distribution()) == "mlx-metal 0.32.4"
    assert find_mlx_distribution().others == ()


@pytest.mark.parametrize(
    ("first", "last"), [("mlx-cpu", "mlx-cuda-12"), ("mlx-cuda-12", "mlx-cpu")]
)
def test_the_last_one_that_was_installed_is_loaded(packages: Path, first: str, last: str) -> None:
    install(packages, first, first.encode())
    install(packages, last, last.encode())
    assert find_mlx_distribution() == MlxDistribution(
        name=last, version="0.32.4", others=(f"{first} 0.32.4",)
    )


def test_a_library_of_neither_is_unknown(packages: Path) -> None:
    install(packages, "mlx-cpu", b"cpu")
    install(packages, "mlx-cuda-13", b"cuda")
    (packages / "mlx" / "lib" / "libmlx.so").unlink()
    found = find_mlx_distribution()
    assert str(found) == "unknown"
    assert found.others == ("mlx-cpu 0.32.4", "mlx-cuda-13 0.32.4")


def test_other_distributions_are_ignored(packages: Path) -> None:
    install(packages, "mlx-lm", b"no library of ours")
    assert str(find_mlx_distribution()) == "unknown"
    assert find_mlx_distribution().others == ()
