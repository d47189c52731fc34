"""The GPU in the report of `mlxrunner doctor`, on simulated machines, because no real one was
available."""

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from app.commands.device_report import (
    DeviceDescription,
    describe_device,
    find_device_problems,
    read_wheel_tag,
    render_device_lines,
)
from app.core.distributions import has_accelerator_hardware

M5 = DeviceDescription(
    system="Darwin",
    macos=(26, 3),
    python_macos=(26, 3),
    chip="Apple M5 Max",
    architecture="applegpu_g17s",
    wheel="macosx_26_0_arm64",
    physical=128 << 30,
    working_set=96 << 30,
    wired_limit_mb=0,
)
M2 = replace(
    M5,
    chip="Apple M2",
    architecture="applegpu_g14g",
    macos=(14, 5),
    python_macos=(14, 5),
    wheel="macosx_14_0_arm64",
    physical=16 << 30,
    working_set=11 << 30,
)
H100 = DeviceDescription(
    system="Linux",
    chip="NVIDIA H100",
    architecture="sm_90",
    driver="580.65.06",
    driver_cuda=(13, 0),
    wheel_cuda=13,
)


@pytest.mark.parametrize("found", [M5, M2, H100, DeviceDescription(system="Linux")])
def test_a_machine_without_problems(found: DeviceDescription) -> None:
    assert list(find_device_problems(found)) == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # a Python built for an older system picks the wheel without the kernels
        (
            replace(M5, wheel="macosx_15_0_arm64", python_macos=(16, 0)),
            r"without kernels .* this Python reports macOS 16\.0 .* again with a Python",
        ),
        (replace(M5, wheel="macosx_15_0_arm64"), r"neural accelerators: prompts .* again"),
        # the wheel turns the accelerators on where macOS does not have them
        (replace(M5, macos=(26, 1)), r"needs macOS 26\.2, but this is macOS 26\.1, .* update"),
        (replace(M2, wheel="macosx_26_0_arm64", macos=(26, 0)), r"needs macOS 26\.2"),
        (replace(M5, macos=(15, 6), wheel="macosx_15_0_arm64"), r"need macOS 26\.2: update"),
        (replace(M2, macos=(13, 6)), r"macOS 13\.6 is too old for MLX: update to macOS 14"),
        (replace(M2, wired_limit_mb=14336), r"iogpu\.wired_limit_mb is 14336, .* 11\.0 GiB"),
        (
            replace(H100, driver="550.54", driver_cuda=(12, 4)),
            r"driver 550\.54 supports CUDA 12\.4, but MLX was built for CUDA 13: update",
        ),
        (replace(H100, driver="", driver_cuda=()), r"driver was not found: install"),
        (replace(H100, architecture="sm_75"), r"\(sm_75\) is older .* 8\.0 or newer"),
    ],
)
def test_each_problem_is_one_sentence_with_a_remedy(
    found: DeviceDescription, expected: str
) -> None:
    [problem] = find_device_problems(found)
    assert re.search(expected, problem), problem
    assert "\n" not in problem


def test_the_report_of_a_mac() -> None:
    report = dict(render_device_lines(M5))
    assert report == {
        "macOS": "26.3, Apple M5 Max",
        "MLX wheel": "macosx_26_0_arm64",
        "neural": "neural accelerators can be used",
        "wired": "at most 96.0 GiB, of 96.0 GiB that macOS allows (the system's default)",
    }
    changed = dict(render_device_lines(replace(M2, wired_limit_mb=10240)))
    assert changed["neural"] == "this chip has no neural accelerators"
    assert (
        changed["wired"]
        == "at most 11.0 GiB, of 11.0 GiB that macOS allows (iogpu.wired_limit_mb = 10240)"
    )
    raised = dict(render_device_lines(replace(M2, working_set=15 << 30)))
    assert raised["wired"].startswith("at most 12.0 GiB, of 15.0 GiB"), "the rest stays free"


def test_the_report_of_an_nvidia_gpu() -> None:
    assert dict(render_device_lines(H100)) == {
        "GPU": "NVIDIA H100 sm_90",
        "driver": "580.65.06, supports CUDA 13.0",
        "CUDA": "13, of MLX's wheel",
    }
    assert list(render_device_lines(DeviceDescription(system="Linux"))) == []


@pytest.mark.parametrize(
    ("architecture", "has"),
    [
        ("applegpu_g16s", False),
        ("applegpu_g17g", True),
        ("applegpu_g17p", False),
        ("applegpu_g18p", True),
        ("sm_90", False),
        ("", False),
    ],
)
def test_neural_accelerators_follow_from_the_architecture(architecture: str, has: bool) -> None:
    assert has_accelerator_hardware(architecture) is has


def test_the_tag_is_read_from_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mlx_metal-0.32.4.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-metal\nVersion: 0.32.4\n")
    (folder / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-macosx_26_0_arm64\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_wheel_tag("mlx-metal") == "macosx_26_0_arm64"
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.distribution("no-such-wheel")
    assert read_wheel_tag("no-such-wheel") is None


def test_this_machine_is_described_without_an_error() -> None:
    assert describe_device({}).system
    mac = describe_device(
        {
            "architecture": "applegpu_g17s",
            "memory_size": 2 << 30,
            "max_recommended_working_set_size": 1 << 30,
        },
        system="Darwin",
    )
    assert (mac.architecture, mac.physical, mac.working_set) == ("applegpu_g17s", 2 << 30, 1 << 30)
