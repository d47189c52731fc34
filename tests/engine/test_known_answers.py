"""Operations with known answers find a device that computes wrong results.

No GPU is needed: two CPU streams take the place of the two devices, and the errors are planted.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.settings import Settings
from app.engine import known_answers, loader
from app.engine.known_answers import (
    DeviceCheck,
    KnownAnswer,
    check_device,
    check_model_on_gpu,
    list_known_answers,
)
from app.engine.model_info import complete_config
from models.base import Model
from tests.models import parity
from tests.models.architectures import Case, cases
from tests.models.kernel_switch import use_kernels

FEW = [case for case in cases() if case.id in ("gemma2-plain", "llama-plain", "qwen3_next-plain")]


def answers_of(model: Model) -> list[KnownAnswer]:
    layers = model.make_kv()
    model(mx.zeros((1, 2), mx.int32), layers)
    return list(list_known_answers(model, layers))


def check(answers: Sequence[KnownAnswer], **options: Any) -> DeviceCheck:
    return check_device(
        answers,
        device=mx.new_stream(mx.Device(mx.cpu)),
        reference=mx.default_stream(mx.Device(mx.cpu)),
        **options,
    )


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.id)
@pytest.mark.parametrize("kind", [None, "affine-4", "affine-8", "mxfp4"])
def test_a_sound_device_passes(case: Case, kind: str | None, tmp_path: Path) -> None:
    parity.save_reference(case, tmp_path, kind=kind)
    with use_kernels(enabled=False):  # the default device of a GPU has no CPU kernels
        answers = answers_of(parity.load_model(tmp_path))
        found = check(answers, clock=lambda: 0.0)
    assert found == DeviceCheck(wrong=[], warnings=[])
    names = [answer.name for answer in answers]
    format_name = {None: "unquantized", "mxfp4": "mxfp4 4-bit"}.get(kind) or (
        f"affine {str(kind)[-1]}-bit"
    )
    for rows in (1, 16, 512):
        assert f"product of {rows} rows with {format_name} weights" in names
    assert sum("attention of 1 queries" in name for name in names) >= 1
    assert "rotation of positions" in names


def plant_error(change: Callable[[mx.array], mx.array]) -> KnownAnswer:
    """Right on the reference, which computes first, and changed on the device."""
    calls: list[int] = []

    def build() -> mx.array:
        calls.append(1)
        sound = mx.random.normal((16, 64), key=mx.random.key(1)).astype(mx.bfloat16)
        return sound if len(calls) == 1 else change(sound)

    return KnownAnswer(name="a product", build=build)


PLANTED: dict[str, Callable[[mx.array], mx.array]] = {
    "ten percent": lambda a: a * 1.1,
    "rows in another order": lambda a: a[::-1],
    "one column is nan": lambda a: mx.where(mx.arange(64) == 3, mx.array(float("nan"), a.dtype), a),
    "half of the rows": lambda a: mx.concatenate([a[:8], mx.zeros_like(a[8:])]),
    "zeros": mx.zeros_like,
}


@pytest.mark.parametrize("change", PLANTED.values(), ids=PLANTED)
def test_a_wrong_result_is_named_with_its_error(change: Callable[[mx.array], mx.array]) -> None:
    found = check([plant_error(change)])
    assert len(found.wrong) == 1
    assert found.wrong[0].startswith("a product has a relative error of ")
    assert not found.warnings


def test_rounding_is_not_wrong() -> None:
    assert not check([plant_error(lambda a: (a.astype(mx.float32) * 1.001).astype(a.dtype))]).wrong


def test_a_missing_operation_is_a_warning() -> None:
    def refuse(array: mx.array) -> mx.array:
        raise RuntimeError("no kernel for this type\nand a second line")

    found = check([plant_error(refuse)])
    assert found == DeviceCheck(
        wrong=[], warnings=["a product fails on the device: no kernel for this type"]
    )


def test_a_slow_operation_is_a_warning() -> None:
    ticks = iter([0.0, 0.2])
    found = check([plant_error(lambda array: array)], clock=lambda: next(ticks))
    assert found == DeviceCheck(wrong=[], warnings=["a product takes 200 ms on the device"])


def test_the_reference_of_a_product_is_fast(tmp_path: Path) -> None:
    """A load must not take longer. A quantized product on a CPU takes a hundred times as long."""
    parity.save_reference(FEW[1], tmp_path, kind="affine-4")
    with use_kernels(enabled=False):
        answers = answers_of(parity.load_model(tmp_path))
    assert all(answer.reference for answer in answers if "affine" in answer.name)


def test_a_cpu_is_not_compared_with_itself(tmp_path: Path) -> None:
    parity.save_reference(FEW[0], tmp_path)
    assert check_model_on_gpu(parity.load_model(tmp_path)) == DeviceCheck(wrong=(), warnings=())


def load(folder: Path) -> object:
    files = complete_config(store.resolve(str(folder)))
    return loader.load(files, Settings(), lambda percent, memory: None)


def test_a_load_is_refused_on_a_device_that_computes_wrong_results(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = DeviceCheck(wrong=["attention has a relative error of 0.9"], warnings=[])
    monkeypatch.setattr(loader, "check_model_on_gpu", lambda model: wrong)
    with pytest.raises(AppError, match=r"attention has a relative error of 0\.9") as caught:
        load(tiny_model)
    assert caught.value.kind is ErrorKind.MODEL_FILES
    assert "\n" not in caught.value.message
    assert "mlxrunner doctor" in caught.value.message


def test_a_slow_device_is_logged_and_the_model_is_loaded(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = DeviceCheck(wrong=[], warnings=["a product takes 200 ms on the device"])
    monkeypatch.setattr(loader, "check_model_on_gpu", lambda model: slow)
    load(tiny_model)
    assert "a product takes 200 ms on the device" in caplog.text


def test_the_tolerances_cover_every_type_of_activations() -> None:
    assert set(known_answers._TOLERANCES) == {mx.float32, mx.float16, mx.bfloat16}
