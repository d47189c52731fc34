"""The settings that a reload applies, and those that need a restart."""

from dataclasses import replace

import pytest

from app.core.errors import AppError
from app.core.settings import (
    RELOADABLE,
    LiveSettings,
    ModelSettings,
    Settings,
    merge_reloaded,
    needs_new_process,
)


def test_limits_and_models_are_applied_and_other_changes_need_a_restart():
    before = Settings(port=1, max_per_key=2, parallel=4)
    models = (ModelSettings(name="a"), ModelSettings(name="b"))
    wanted = Settings(port=9, max_per_key=3, parallel=8, log_level="debug", models=models)
    merged, kept = merge_reloaded(before, wanted)
    assert merged == replace(before, max_per_key=3, log_level="debug", models=models)
    assert set(kept) == {"port", "parallel"}
    assert merge_reloaded(merged, merged) == (merged, ())


def test_a_conflict_with_a_setting_that_is_kept_is_an_error():
    before = Settings(max_loaded=1)
    pinned = tuple(ModelSettings(name=name, pinned=True) for name in "ab")
    with pytest.raises(AppError, match="only 1"):
        merge_reloaded(before, Settings(max_loaded=2, models=pinned))


def test_only_settings_of_the_engine_need_a_new_process():
    before = Settings()
    model = ModelSettings(name="a", alias="x", preload=True)
    changed = replace(before, max_queue=1, max_tokens=5, keep_alive=1.0, models=(model,))
    assert not needs_new_process(before, changed)
    assert needs_new_process(before, replace(before, context=512))
    assert needs_new_process(before, before.for_model(replace(model, quantize=4)))


def test_every_reloadable_setting_exists():
    assert Settings.__dataclass_fields__.keys() >= RELOADABLE


def test_listeners_get_the_settings_after_they_are_in_effect():
    live = LiveSettings(Settings())
    seen: list[tuple[Settings, Settings]] = []
    live.subscribe(lambda settings: seen.append((settings, live.current)))
    live.replace(Settings(max_queue=1))
    assert seen == [(Settings(max_queue=1), Settings(max_queue=1))]
