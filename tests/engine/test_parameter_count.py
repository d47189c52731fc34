"""Parameters are counted from headers."""

from pathlib import Path

from app.engine.model_info import complete_config
from app.engine.parameter_count import count_parameters
from app.store import find
from tests import tiny
from tests.store.ollama_store import CONFIG, packed_folder


def parameters(config: dict[str, object]) -> int:
    return sum(array.size for array in tiny.weights({**tiny.CONFIG, **config}).values())


def test_parameters_of_a_plain_model_are_counted(tiny_model: Path) -> None:
    found = count_parameters(complete_config(find(str(tiny_model))))
    assert found.parameters == parameters({})
    assert found.nbytes == 4 * found.parameters
    assert found.by_format == {"float32": found.parameters}
    assert found.bits_per_parameter == 32


def test_a_packed_model_has_the_parameters_of_the_plain_one(tmp_path: Path) -> None:
    """4 bits, with a scale and a bias of 32 bits for each 64 weights: 5; norms are not packed."""
    found = count_parameters(complete_config(find(str(packed_folder(tmp_path / "packed")))))
    assert found.parameters == parameters(CONFIG)
    assert list(found.by_format) == ["4-bit affine", "float32"]
    assert 5 < found.bits_per_parameter < 5.2
