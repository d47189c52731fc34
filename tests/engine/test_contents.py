"""What a model is made of, counted without reading it."""

from pathlib import Path

from app.engine.contents import contents
from app.engine.describe import complete
from app.store import find
from tests import tiny
from tests.store.ollama_store import CONFIG, packed_folder


def parameters(config: dict[str, object]) -> int:
    return sum(array.size for array in tiny.weights({**tiny.CONFIG, **config}).values())


def test_a_plain_model_is_counted(tiny_model: Path) -> None:
    found = contents(complete(find(str(tiny_model))))
    assert found.parameters == parameters({})
    assert found.nbytes == 4 * found.parameters
    assert found.kinds == {"float32": found.parameters}
    assert found.bits == 32


def test_a_packed_model_has_the_parameters_of_the_plain_one(tmp_path: Path) -> None:
    """4 bits, and a scale and a bias of 32 bits for each 64 of them: 5; the norms stay plain."""
    found = contents(complete(find(str(packed_folder(tmp_path / "packed")))))
    assert found.parameters == parameters(CONFIG)
    assert list(found.kinds) == ["4-bit affine", "float32"]
    assert 5 < found.bits < 5.2
