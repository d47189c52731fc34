"""The registry of models that a request may name."""

import asyncio
import math
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelDefaults, ModelFiles
from app.core.settings import AdapterSettings, ModelSettings, Settings
from app.engine.model_info import complete_config
from app.serving.registry import ModelRegistry, build_entry
from tests import tiny
from tests.server_process import TIMEOUT


def open_registry(settings: Settings) -> ModelRegistry:
    models = settings.models or (None,)
    return ModelRegistry(
        [
            build_entry(m, complete_config(store.find(m.name if m else None)), settings)
            for m in models
        ],
        settings,
    )


def names_after(
    registry: ModelRegistry, update: Callable[[ModelRegistry], Awaitable[Any]]
) -> list[str]:
    """The registered names after the update."""

    async def run() -> None:
        await update(registry)

    asyncio.run(run())
    return [entry.served.name for entry in registry.entries()]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, and no Ollama store."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return tmp_path / "hub"


def install(hub: Path, model: Path, name: str) -> None:
    """Install a model in the layout of huggingface_hub."""
    repo = hub / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    shutil.copytree(model, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)


def test_without_a_name_the_built_in_model_is_served():
    (entry,) = open_registry(Settings()).entries()
    assert (entry.served.name, entry.served.source) == ("builtin", "builtin")
    assert entry.served.keep_alive == math.inf


def test_a_model_named_at_start_has_its_own_settings(tiny_model: Path):
    settings = Settings(
        models=(
            ModelSettings(name=str(tiny_model), alias="a", parallel=3, keep_alive=60, pinned=True),
            ModelSettings(name=str(tiny_model)),
        ),
        parallel=1,
        keep_alive=900,
    )
    first, second = open_registry(settings).entries()
    assert (first.served.name, first.files.name) == ("a", "a")
    assert (first.served.keep_alive, first.served.pinned) == (60, True)
    assert first.served.settings.parallel == 3
    assert (second.served.name, second.served.keep_alive) == (tiny_model.name, 900)
    assert second.served.settings.parallel == 1


def test_a_model_has_further_names(tiny_model: Path):
    model = ModelSettings(name=str(tiny_model), alias="a", aliases=("gpt-4o", "b"))
    registry = open_registry(Settings(models=(model,)))
    (entry,) = registry.entries()
    names = ("a", "gpt-4o", "b", "b:latest")
    assert [registry.find(name) for name in names] == [entry] * 4
    assert registry.is_named("gpt-4o")
    assert registry.find("c") is None


def test_two_models_with_one_name_are_rejected(tiny_model: Path):
    twice = Settings(models=tuple(ModelSettings(name=f"{tiny_model}{end}") for end in ("", "/")))
    with pytest.raises(AppError, match="alias") as caught:
        open_registry(twice)
    assert caught.value.kind is ErrorKind.INVALID


def test_the_latest_tag_of_ollama_is_ignored():
    registry = open_registry(Settings())
    assert registry.find("builtin:latest") is registry.find("builtin")
    assert registry.find("builtin:other") is None


def test_a_name_of_ollamas_library_finds_the_model_in_mlx_format(hub: Path, tiny_model: Path):
    install(hub, tiny_model, "mlx-community/Qwen3-4B-4bit")
    registry = open_registry(Settings(installed=True))
    asyncio.run(registry.discover("qwen3:4b"))
    for name in ("qwen3:4b", "library/qwen3:4b-q4_K_M"):
        entry = registry.find(name)
        assert entry is not None
        assert entry.served.name == "mlx-community/Qwen3-4B-4bit"
    assert registry.find("qwen3:8b") is None
    assert registry.find_own("qwen3:4b") is None


def test_installed_models_are_served_only_with_the_option(hub: Path, tiny_model: Path):
    install(hub, tiny_model, "org/tiny")
    update = lambda c: c.discover("org/tiny")  # noqa: E731
    assert names_after(open_registry(Settings()), update) == ["builtin"]
    assert names_after(open_registry(Settings(installed=True)), update) == ["builtin", "org/tiny"]


def test_a_newly_installed_model_is_found_by_its_name(
    hub: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.serving.registry._RESCAN_INTERVAL", 0.0)
    registry = open_registry(Settings(installed=True))

    async def update(registry: ModelRegistry) -> None:
        await registry.discover("org/tiny")
        assert registry.find("org/tiny") is None
        install(hub, tiny_model, "org/tiny")
        await asyncio.gather(*(registry.discover("org/tiny") for _ in range(5)))

    assert names_after(registry, update) == ["builtin", "org/tiny"]
    entry = registry.find("org/tiny")
    assert entry is not None
    assert entry.served.keep_alive == 300
    assert asyncio.run(registry.load_verified_files(entry.served)).name == "org/tiny"


def test_a_name_is_never_a_path(hub: Path, tiny_model: Path):
    """A request opens only registered names."""
    install(hub, tiny_model, "org/tiny")
    registry = open_registry(Settings(installed=True))
    relative = os.path.relpath(tiny_model)
    for name in (str(tiny_model), relative, "./", "..", "org/../org/tiny", "/etc/passwd", "~"):
        names_after(registry, lambda c, name=name: c.discover(name))
        assert registry.find(name) is None


def test_a_broken_model_is_not_listed(hub: Path, tiny_model: Path):
    install(hub, tiny_model, "org/tiny")
    install(hub, tiny_model, "org/broken")
    (config,) = (hub / "models--org--broken").rglob("config.json")
    config.write_text("{")
    registry = open_registry(Settings(installed=True))
    assert names_after(registry, lambda c: c.rescan()) == ["builtin", "org/tiny"]


def test_a_disk_error_keeps_the_registered_models(
    hub: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("app.serving.registry._RESCAN_INTERVAL", 0.0)
    install(hub, tiny_model, "org/tiny")
    registry = open_registry(Settings(installed=True))
    assert names_after(registry, lambda c: c.rescan()) == ["builtin", "org/tiny"]

    def fail() -> Iterator[store.InstalledModel]:
        raise AppError(ErrorKind.MODEL_FILES, "the cache cannot be read: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(store, "list_installed", fail)
        for _ in range(2):
            names = names_after(registry, lambda c: c.discover("org/other"))
        assert names == ["builtin", "org/tiny"]
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    assert "Input/output error" in caplog.text
    shutil.rmtree(hub)
    assert names_after(registry, lambda c: c.rescan()) == ["builtin"]


def test_a_model_named_at_start_overrides_an_installed_one(hub: Path, tiny_model: Path):
    install(hub, tiny_model, "org/tiny")
    named = ModelSettings(name=str(tiny_model), alias="org/tiny")
    registry = open_registry(Settings(installed=True, models=(named,)))
    assert names_after(registry, lambda c: c.rescan()) == ["org/tiny", "builtin"]
    entry = registry.find("org/tiny")
    assert entry is not None
    assert entry.served.source == str(tiny_model)


def test_an_entry_is_replaced_only_if_its_files_change(
    hub: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.serving.registry._RESCAN_INTERVAL", 0.0)
    install(hub, tiny_model, "org/tiny")
    registry = open_registry(Settings(installed=True))
    entries: list[object] = []
    for _ in range(2):
        names_after(registry, lambda c: c.rescan())
        entries.append(registry.find("org/tiny"))
    [config] = (hub / "models--org--tiny").rglob("config.json")
    (config.parent / "generation_config.json").write_text('{"top_k": 7}')
    names_after(registry, lambda c: c.rescan())
    assert entries[0] is entries[1] is not registry.find("org/tiny")


def test_concurrent_loads_verify_the_files_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    """The digests of a large model take minutes the first time, and a thread cannot be
    cancelled."""
    (entry,) = (
        registry := open_registry(Settings(models=(ModelSettings(name=str(tiny_model)),)))
    ).entries()
    release, reading, sources = threading.Event(), threading.Event(), list[str | None]()

    def slow_resolve(source: str | None) -> ModelFiles:
        sources.append(source)
        reading.set()
        release.wait(TIMEOUT)
        if len(sources) == 1:
            raise AppError(ErrorKind.MODEL_FILES, "a digest is wrong")
        return entry.files

    monkeypatch.setattr("app.serving.registry._resolve_verified", slow_resolve)

    async def run() -> None:
        for _ in range(5):
            task = asyncio.create_task(registry.load_verified_files(entry.served))
            assert await asyncio.to_thread(reading.wait, TIMEOUT)
            task.cancel()
        assert len(sources) == 1
        tasks = [asyncio.create_task(registry.load_verified_files(entry.served)) for _ in range(2)]
        await asyncio.sleep(0)
        release.set()
        assert {str(e) for e in await asyncio.gather(*tasks, return_exceptions=True)} == {
            "a digest is wrong"
        }
        assert (await registry.load_verified_files(entry.served)).name == entry.served.name

    asyncio.run(run())


def test_files_are_read_again_for_each_load(tmp_path: Path):
    folder = tiny.write(tmp_path / "model")
    registry = open_registry(Settings(models=(ModelSettings(name=str(folder)),)))
    (entry,) = registry.entries()
    assert asyncio.run(registry.load_verified_files(entry.served)) == entry.files
    (folder / "model.safetensors").unlink()
    with pytest.raises(AppError) as caught:
        asyncio.run(registry.load_verified_files(entry.served))
    assert caught.value.kind is ErrorKind.MODEL_FILES
    shutil.rmtree(folder)
    with pytest.raises(AppError, match="the files of model no longer exist") as caught:
        asyncio.run(registry.load_verified_files(entry.served))
    assert caught.value.kind is ErrorKind.MODEL_FILES, "it is still served, and listed"


def test_broken_installed_models_are_logged_once(
    hub: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Only the log says why a model is missing in GET /v1/models."""
    monkeypatch.setattr("app.serving.registry._RESCAN_INTERVAL", 0.0)
    caplog.set_level("INFO", logger="app.serving.registry")
    install(hub, tiny_model, "org/tiny")
    install(hub, tiny_model, "org/broken")
    [config] = (hub / "models--org--broken").rglob("config.json")
    config.write_text("{")
    registry = open_registry(Settings(installed=True))
    for _ in range(3):
        assert names_after(registry, lambda c: c.rescan()) == ["builtin", "org/tiny"]
    expected = "cannot serve 1 installed model: `mlxrunner show NAME` shows the reason"
    assert caplog.messages == [expected]


def test_an_installed_model_does_not_have_the_adapters_of_another(hub: Path, tiny_model: Path):
    """No installed model of another architecture could be loaded."""
    install(hub, tiny_model, "org/tiny")
    adapter = AdapterSettings(name="sql", path="/sql")
    registry = open_registry(Settings(installed=True, adapters=(adapter,)))
    asyncio.run(registry.rescan())
    found = {entry.served.name: entry.served.settings.adapters for entry in registry.entries()}
    assert found == {"builtin": (adapter,), "org/tiny": ()}


def test_changed_adapters_stay_until_a_reload_changes_those_of_the_model(tiny_model: Path):
    def build(*adapters: AdapterSettings) -> Settings:
        return Settings(models=(ModelSettings(name=str(tiny_model), adapters=adapters),))

    def reload(settings: Settings) -> list[str]:
        [model] = settings.models
        entry = build_entry(model, complete_config(store.find(model.name)), settings)
        registry.replace_named([entry], settings)
        [found] = registry.entries()
        return [adapter.name for adapter in found.served.settings.adapters]

    first, second = (AdapterSettings(name=name, path=f"/{name}") for name in "xy")
    registry = open_registry(build(first))
    entry = registry.set_adapters("tiny", [second])
    assert entry is registry.find("tiny")
    assert entry.served.settings.adapters == (second,)
    assert reload(build(first)) == ["y"]
    defaults = ModelDefaults(name="tiny", max_tokens=3)
    changed = asyncio.run(registry.set_defaults(defaults, None))
    assert changed.served.settings.adapters == (second,)
    assert reload(build(first, second)) == ["x", "y"]
    assert reload(build(first)) == ["x"]
