"""The launcher of several ranks is detected from environment variables."""

import json
from pathlib import Path

import pytest

from app.core.errors import AppError
from app.core.settings import ModelSettings, Settings
from app.runners.ranks.launch import Launch, detect_launch, restrict_to_one_model


def write_json(folder: Path, value: object) -> str:
    path = folder / "hosts.json"
    path.write_text("" if value is None else json.dumps(value))
    return str(path)


def test_a_process_without_a_launcher_is_alone() -> None:
    assert detect_launch({"HOME": "/"}) is None


def test_the_first_address_of_a_ring_is_rank_0(tmp_path: Path) -> None:
    hosts = [["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5000"], ["10.0.0.3:5000"]]
    environ = {"MLX_RANK": "2", "MLX_HOSTFILE": write_json(tmp_path, hosts)}
    assert detect_launch(environ) == Launch(rank=2, size=3, host="10.0.0.1")


def test_a_launch_of_one_rank_is_alone(tmp_path: Path) -> None:
    """mlx.launch writes an empty file for one rank."""
    assert detect_launch({"MLX_RANK": "0", "MLX_HOSTFILE": write_json(tmp_path, None)}) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"MLX_JACCL_COORDINATOR": "10.0.0.1:5000"},
            Launch(rank=1, size=2, host="10.0.0.1"),
        ),
        ({}, Launch(rank=1, size=2, host=None)),
    ],
)
def test_over_thunderbolt_the_coordinator_is_rank_0(
    variables: dict[str, str], expected: Launch, tmp_path: Path
) -> None:
    devices = write_json(tmp_path, [[None, "rdma_en3"], ["rdma_en3", None]])
    assert detect_launch({"MLX_RANK": "1", "MLX_IBV_DEVICES": devices, **variables}) == expected


def test_nccl_and_mpi_give_the_number_of_ranks() -> None:
    nccl = {"MLX_RANK": "1", "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "10.0.0.1"}
    assert detect_launch(nccl) == Launch(rank=1, size=2, host="10.0.0.1")
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    assert detect_launch(mpi) == Launch(rank=0, size=4, host=None)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MLX_RANK": "x", "MLX_WORLD_SIZE": "2"}, "MLX_RANK must be a number, not 'x'"),
        (
            {"MLX_RANK": "2", "MLX_WORLD_SIZE": "2"},
            "rank 2 is out of range: the 2 ranks are counted from 0",
        ),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "/not/there"}, "MLX_HOSTFILE: cannot read /not/there"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE must be a number, not ''"),
    ],
)
def test_invalid_variables_are_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(AppError, match=message):
        detect_launch(environ)


def test_a_file_without_a_list_of_ranks_is_an_error(tmp_path: Path) -> None:
    environ = {"MLX_RANK": "0", "MLX_HOSTFILE": write_json(tmp_path, {"a": 1})}
    with pytest.raises(AppError, match="does not contain a list of ranks"):
        detect_launch(environ)


def test_a_rank_runs_its_engine_on_a_thread() -> None:
    assert Settings().runner == "process"
    assert restrict_to_one_model(Settings()).runner == "thread"


@pytest.mark.parametrize(
    "settings",
    [
        Settings(installed=True),
        Settings(models=(ModelSettings(name="a"), ModelSettings(name="b"))),
    ],
)
def test_ranks_serve_one_model_together(settings: Settings) -> None:
    with pytest.raises(AppError, match="name exactly one model, without --installed"):
        restrict_to_one_model(settings)
