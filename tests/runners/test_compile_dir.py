"""MLX loads compiled code from a folder that no other user can write to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.runners import compile_dir
from app.runners.compile_dir import prepare_compile_dir
from tests.server_process import ROOT


@pytest.fixture
def common(tmp_path: Path) -> Path:
    """A folder that all users can write to, like /tmp."""
    folder = tmp_path / "common"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_common_folder_is_replaced_by_a_private_one(tmp_path: Path, common: Path) -> None:
    variables = prepare_compile_dir({"TMPDIR": str(common), "HOME": str(tmp_path / "home")})
    folder = Path(variables["TMPDIR"])
    assert folder == tmp_path / "home" / ".cache" / "mlxrunner" / "scratch"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert prepare_compile_dir({"TMPDIR": str(folder)}) == {}


def test_xdg_cache_home_is_used(tmp_path: Path, common: Path) -> None:
    environ = {"TMPDIR": str(common), "HOME": "/", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert prepare_compile_dir(environ) == {
        "TMPDIR": str(tmp_path / "cache" / "mlxrunner" / "scratch")
    }


def test_without_a_home_the_private_folder_is_in_the_common_one(common: Path) -> None:
    variables = prepare_compile_dir({"TMPDIR": str(common), "HOME": "/proc/nowhere"})
    assert Path(variables["TMPDIR"]).parent == common


@pytest.mark.parametrize("trap", ["open to all", "a link", "a file", "another user's", "noexec"])
def test_without_a_trusted_folder_nothing_is_compiled(
    common: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    planted = common / f"mlxrunner-{os.getuid()}"
    match trap:
        case "open to all":
            planted.mkdir()
            planted.chmod(0o777)
        case "a link":
            planted.symlink_to(tmp_path)
        case "a file":
            planted.touch()
        case "another user's":
            planted.mkdir(mode=0o700)
            uid = os.getuid()
            planted.rename(common / f"mlxrunner-{uid + 1}")
            monkeypatch.setattr(compile_dir.os, "getuid", lambda: uid + 1)
        case _:
            flags = os.statvfs(common)
            monkeypatch.setattr(
                compile_dir.os,
                "statvfs",
                lambda _: os.statvfs_result([*flags[:8], os.ST_NOEXEC, *flags[9:]]),
            )
    variables = prepare_compile_dir({"TMPDIR": str(common), "HOME": "/proc/nowhere"})
    assert variables == {"MLX_DISABLE_COMPILE": "1"}


FUSED = """
import os, sys
from app.runners.compile_dir import prepare_compile_dir
os.environ.update(prepare_compile_dir())
import mlx.core as mx
import mlx.nn as nn
print(nn.silu(mx.ones((3,))).tolist()[0], os.environ["TMPDIR"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="MLX compiles in a folder only on Linux")
def test_mlx_compiles_in_the_private_folder(tmp_path: Path, common: Path) -> None:
    """Even if another user has created the folder that MLX would use."""
    (common / "mlx").mkdir()
    environ = {**os.environ, "TMPDIR": str(common), "HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    output = subprocess.run(
        [sys.executable, "-c", FUSED],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.split()
    assert abs(float(output[0]) - 0.731) < 0.001
    assert Path(output[1]).is_relative_to(tmp_path)
    assert not list((common / "mlx").iterdir())
