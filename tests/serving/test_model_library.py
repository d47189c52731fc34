"""Models that are installed, created and deleted while the server runs: on a real disk, from a hub
in a thread."""

import asyncio
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import mlx.core as mx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.model_files import ModelFiles
from app.core.models import DownloadPreview, LibraryStep, MemoryRequirement, ModelRecipe
from app.core.settings import ModelSettings, Settings
from app.engine import fit
from app.engine.model_info import complete_config
from app.serving.model_library import InstalledModels
from app.serving.registry import ModelRegistry, build_entry
from app.store import digests
from app.store.ollama import writer
from tests import tiny
from tests.models.gguf.raw_file import gguf as raw_gguf
from tests.models.gguf.raw_file import text_entry
from tests.store.asking import NAME
from tests.store.conftest import commit, hub, nowhere_else, remote  # noqa: F401  # fixtures
from tests.store.gguf.files import write_tiny as write_gguf
from tests.store.stand_in import StandIn
from tests.waiting import wait_until_async

SHORT = HealthCheck.function_scoped_fixture


@pytest.fixture
def base(tiny_model: Path) -> ModelSettings:
    return ModelSettings(name=str(tiny_model), alias="base")


@pytest.fixture
def use(nowhere_else: None, base: ModelSettings) -> Callable[..., Any]:  # noqa: F811
    """use(function of the library and the registry, **settings): its result."""

    def run(
        function: Callable[[InstalledModels, ModelRegistry], Awaitable[Any]], **changes: Any
    ) -> Any:
        chosen = Settings(models=(base,), **{"installed": True, **changes})
        files = complete_config(store.find(base.name))

        async def inner() -> Any:
            registry = ModelRegistry([build_entry(base, files, chosen)], chosen)
            return await function(InstalledModels(registry), registry)

        return asyncio.run(inner())

    return run


async def collect(steps: Any) -> list[LibraryStep]:
    async with aclosing(steps):
        return [step async for step in steps]


async def pull_again(library: InstalledModels) -> list[LibraryStep]:
    """A pull, once the one before has ended."""
    for _ in range(1000):
        try:
            return await collect(library.pull(NAME.repo_id))
        except AppError as error:
            if error.kind is not ErrorKind.BUSY:
                raise
            await asyncio.sleep(0.02)
    raise AssertionError("the stopped download did not end")


async def upload(library: InstalledModels, name: str, content: bytes) -> None:
    async with library.upload_blob(name) as blob:
        await blob.write(content)
        await blob.commit()


async def is_refused(work: Callable[[], Awaitable[Any]]) -> bool:
    try:
        await work()
    except AppError as error:
        if error.kind not in (ErrorKind.INVALID, ErrorKind.MODEL_NOT_FOUND):
            raise
        return True
    return False


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def recipe(**changes: Any) -> ModelRecipe:
    return ModelRecipe(**{"name": "poet", "base": "base", **changes})


def test_a_pull_reports_each_file_and_the_model_can_be_requested(
    use,
    hub: StandIn,  # noqa: F811
    commit: str,  # noqa: F811
):
    async def body(library: InstalledModels, registry: ModelRegistry) -> list[LibraryStep]:
        steps = await collect(library.pull(NAME.repo_id))
        assert registry.find(NAME.repo_id) is not None
        return steps

    steps = use(body)
    statuses = [step.status for step in steps if step.status]
    assert statuses == [
        "pulling manifest",
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    layers = [step.layer for step in steps if step.layer is not None]
    by_digest: dict[str, list[int]] = {}
    for layer in layers:
        by_digest.setdefault(layer.digest, []).append(layer.completed)
        assert layer.completed <= layer.total
    for completed in by_digest.values():
        assert completed == sorted(completed)
    ends = {layer.digest: layer for layer in layers}
    assert all(layer.completed == layer.total for layer in ends.values())


def test_a_preview_estimates_the_memory_before_a_weight_is_downloaded(
    use,
    hub: StandIn,  # noqa: F811
    remote: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """With the estimate of the downloaded model. The model has two files of weights, larger than
    what is read of them."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = tiny.write(tmp_path / "wide", intermediate_size=4096)
    weights = folder / "model.safetensors"
    tensors: Any = mx.load(str(weights))
    for layer in range(2):
        is_in = {name: ("layers.1." in name) == bool(layer) for name in tensors}
        part = {name: array for name, array in tensors.items() if is_in[name]}
        mx.save_safetensors(str(folder / f"model-{layer}.safetensors"), part)
    weights.unlink()
    head = hub.add("org/wide", folder)
    settings = Settings(installed=True)

    async def estimate(files: ModelFiles) -> MemoryRequirement:
        return await asyncio.to_thread(fit.estimate_memory, files, settings)

    async def body(_: InstalledModels, registry: ModelRegistry) -> DownloadPreview:
        return await InstalledModels(registry, estimate).preview("org/wide")

    preview = use(body)
    expected = fit.estimate_memory(complete_config(store.find(str(folder))), settings)
    assert preview.memory_needed == expected.min_bytes
    assert preview.memory_available == pytest.approx(expected.device_budget, rel=0.5)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert (preview.name, preview.commit, preview.size) == ("org/wide", head, sum(sizes.values()))
    assert preview.missing > 0.9 * preview.size
    assert preview.context_length == 4096
    assert preview.disk_available > 0
    asked = hub.downloads(".safetensors")
    assert len({request.path.rpartition("/")[2] for request in asked}) == 2
    for request in asked:
        assert request.end is not None
        assert request.end <= 100_000 < min(sizes[f"model-{layer}.safetensors"] for layer in (0, 1))
    assert list(tmp_path.glob("mlxrunner-preview-*")) == []


def test_a_preview_of_a_model_that_cannot_be_served_is_an_error(use, hub: StandIn, tmp_path: Path):  # noqa: F811
    """The header of its weights does not belong to its config."""
    folder = tiny.write(tmp_path / "broken")
    weights = folder / "model.safetensors"
    mx.save_safetensors(str(weights), {"other": mx.zeros((4,))})
    hub.add("org/broken", folder)

    async def estimate(files: ModelFiles) -> MemoryRequirement:
        return await asyncio.to_thread(fit.estimate_memory, files, Settings(installed=True))

    async def body(_: InstalledModels, registry: ModelRegistry) -> None:
        with pytest.raises(AppError) as caught:
            await InstalledModels(registry, estimate).preview("org/broken")
        assert caught.value.kind is ErrorKind.INVALID
        assert caught.value.message.startswith("org/broken")
        assert "mlxrunner-preview" not in caught.value.message
        with pytest.raises(AppError, match="has no known equivalent"):
            await InstalledModels(registry, estimate).preview("nothing")

    use(body)


def test_a_preview_of_a_gguf_file_estimates_its_memory(use, hub: StandIn, tmp_path: Path):  # noqa: F811
    path = write_gguf(tmp_path / "remote/Wide-F32.gguf", intermediate_size=1 << 15)
    hub.add("org/Wide-GGUF", path.parent)
    settings = Settings(installed=True)

    async def estimate(files: ModelFiles) -> MemoryRequirement:
        return await asyncio.to_thread(fit.estimate_memory, files, settings)

    async def body(_: InstalledModels, registry: ModelRegistry) -> DownloadPreview:
        return await InstalledModels(registry, estimate).preview("hf.co/org/Wide-GGUF:F32")

    preview = use(body)
    expected = fit.estimate_memory(complete_config(store.find(str(path))), settings)
    assert preview.memory_needed == expected.min_bytes
    assert preview.missing == preview.size == path.stat().st_size
    assert (preview.name, preview.context_length) == ("org/Wide-GGUF:F32", 4096)
    assert max(request.end or preview.size for request in hub.downloads(".gguf")) < 5 << 20


def test_a_gguf_file_that_cannot_be_served_is_invalid(use, hub: StandIn, tmp_path: Path):  # noqa: F811
    path = tmp_path / "remote/Odd-Q8_0.gguf"
    path.parent.mkdir()
    path.write_bytes(raw_gguf([text_entry("general.architecture", "plamo3")], data=bytes(2000)))
    hub.add("org/Odd-GGUF", path.parent)

    async def estimate(files: ModelFiles) -> MemoryRequirement:
        raise AssertionError("the header is checked first")

    async def body(library: InstalledModels, registry: ModelRegistry) -> None:
        previewer = InstalledModels(registry, estimate)
        for call in (
            lambda: collect(library.pull("org/Odd-GGUF")),
            lambda: previewer.preview("org/Odd-GGUF"),
        ):
            with pytest.raises(
                AppError, match=r"org/Odd-GGUF/Odd-Q8_0\.gguf: .*'plamo3'"
            ) as caught:
                await call()
            assert caught.value.kind is ErrorKind.INVALID
            assert caught.value.message.endswith("nothing was downloaded")

    use(body)


def test_a_pull_reports_that_it_verifies_while_it_does(
    use,
    hub: StandIn,  # noqa: F811
    commit: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    """The status came when the digests had been verified."""
    is_reported = threading.Event()
    sha256 = digests.sha256

    def verify(path: Path, *rest: Any) -> str:
        assert is_reported.wait(60)
        return sha256(path, *rest)

    async def body(library: InstalledModels, _: ModelRegistry) -> list[LibraryStep]:
        steps: list[LibraryStep] = []
        monkeypatch.setattr(digests, "sha256", verify)
        async for step in library.pull(NAME.repo_id):
            steps.append(step)
            if step.status == "verifying sha256 digest":
                is_reported.set()
        return steps

    steps = use(body)
    at = [step.status for step in steps].index("verifying sha256 digest")
    last = {step.layer.digest: step.layer for step in steps[:at] if step.layer is not None}
    assert last
    assert all(layer.completed == layer.total for layer in last.values())
    assert [step.status for step in steps[at + 1 :]] == ["writing manifest", "success"]


def test_a_name_of_ollamas_library_is_pulled_and_requested_in_mlx_format(
    use,
    hub: StandIn,  # noqa: F811
    tiny_model: Path,
):
    hub.add("mlx-community/Qwen3-4B-4bit", tiny_model)

    async def body(library: InstalledModels, registry: ModelRegistry) -> None:
        assert (await collect(library.pull("qwen3:4b")))[-1].status == "success"
        for name in ("qwen3:4b", "mlx-community/Qwen3-4B-4bit"):
            entry = registry.find(name)
            assert entry is not None
            assert entry.served.name == "mlx-community/Qwen3-4B-4bit"
        # now it is installed
        before = len(hub.requests)
        assert (await collect(library.pull("qwen3:4b")))[-1].status == "success"
        assert len(hub.requests) > before
        # a model of that name can still be created
        await collect(library.create(recipe(name="qwen3:4b")))
        entry = registry.find("qwen3:4b")
        assert entry is not None
        assert entry.served.name == "qwen3:4b"

    use(body)


def test_a_pull_of_a_similar_name_suggests_names(use, hub: StandIn):  # noqa: F811
    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        with pytest.raises(
            AppError, match=r"did you mean gemma3, gemma3n, gemma4\? Or pull a repository"
        ):
            await collect(library.pull("gema3"))

    use(body)


def test_a_pull_of_an_unknown_model_fails(use, hub: StandIn):  # noqa: F811
    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        for name in ("no/such", "qwen3:8b", "tiny"):
            with pytest.raises(
                AppError, match="pull model manifest: file does not exist"
            ) as caught:
                await collect(library.pull(name))
            assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND

    use(body)


def test_a_second_pull_is_refused_and_a_closed_pull_continues_later(
    use,
    hub: StandIn,  # noqa: F811
    commit: str,  # noqa: F811
):
    """A disconnect leaves no download behind."""
    hub.faults.stall["model.safetensors"] = 60

    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        steps = library.pull(NAME.repo_id)
        async for step in steps:
            if step.layer is not None:
                break
        with pytest.raises(AppError, match="another download is running") as caught:
            await collect(library.pull(NAME.repo_id))
        assert caught.value.kind is ErrorKind.BUSY
        await steps.aclose()
        hub.resumed.set()
        # once the thread has noticed, the next one continues where this one stopped
        assert (await pull_again(library))[-1].status == "success"

    use(body)


def test_a_preset_adds_to_its_base_and_shares_its_files(use, tmp_path: Path):
    made = recipe(
        system="Rhyme.", parameters={"temperature": 0.5, "num_ctx": 64}, messages=(("user", "a"),)
    )

    async def body(library: InstalledModels, registry: ModelRegistry) -> None:
        assert (await collect(library.create(made)))[-1].status == "success"
        await library.copy("poet", "other:v2")
        for name in ("poet", "other:v2"):
            entry = registry.find(name)
            assert entry is not None
            files = entry.files
            assert (files.system_prompt, files.first_messages) == ("Rhyme.", (("user", "a"),))
            assert files.generation_config["temperature"] == 0.5
            assert files.resolve_context_length(None) == 64
            assert store.resolve(name).weight_bytes > 0  # every digest is right
        blobs = files_below(tmp_path / "ollama" / "blobs")
        await library.delete("poet")
        assert registry.find("poet") is None
        # what the copy needs stays
        assert store.resolve("other:v2").system_prompt == "Rhyme."
        assert len(files_below(tmp_path / "ollama" / "blobs")) >= len(blobs) - 2
        await library.delete("other:v2")
        assert files_below(tmp_path / "ollama") == set()

    use(body)


def test_a_manifest_is_as_ollama_writes_it(use, tmp_path: Path):
    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        await collect(library.create(recipe(system="Rhyme.")))

    use(body)
    path = tmp_path / "ollama/manifests/registry.ollama.ai/library/poet/latest"
    manifest = orjson.loads(path.read_bytes())
    assert manifest["schemaVersion"] == 2
    kinds = {layer["mediaType"].rpartition(".")[2] for layer in manifest["layers"]}
    assert kinds == {"json", "tensor", "system"}
    for layer in (manifest["config"], *manifest["layers"]):
        blob = tmp_path / "ollama/blobs" / layer["digest"].replace(":", "-")
        content = blob.read_bytes()
        assert (len(content), f"sha256:{hashlib.sha256(content).hexdigest()}") == (
            layer["size"],
            layer["digest"],
        )


@pytest.mark.parametrize("parameters", [{"num_ctx": -1}, {"temperature": 1e300}, {"top_k": -3}])
def test_a_creation_that_fails_leaves_the_earlier_model(use, parameters: dict[str, Any]):
    async def body(library: InstalledModels, registry: ModelRegistry) -> None:
        await collect(library.create(recipe(system="Rhyme.")))
        with pytest.raises(AppError) as caught:
            await collect(library.create(recipe(parameters=parameters)))
        assert caught.value.kind is ErrorKind.INVALID
        assert "/" not in caught.value.message.replace("registry.ollama.ai/library/", "")
        entry = registry.find("poet")
        assert entry is not None
        assert store.find("poet").system_prompt == "Rhyme."

    use(body)


def test_a_model_named_at_start_cannot_be_deleted(use):
    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        with pytest.raises(AppError, match="named when the server was started"):
            await library.delete("base")
        with pytest.raises(AppError, match="choose another name"):
            await collect(library.create(recipe(name="base")))

    use(body)


def test_a_model_named_at_start_cannot_be_deleted_under_another_name(
    use,
    hub: StandIn,  # noqa: F811
    commit: str,  # noqa: F811
):
    """Only the exact name was protected. An alias or a revision is another name of the files."""

    async def install(library: InstalledModels, _: ModelRegistry) -> None:
        await collect(library.create(recipe()))
        await library.copy("poet", "other:v2")
        await library.copy("poet", "third")
        await collect(library.pull(NAME.repo_id))

    use(install)
    models = (
        ModelSettings(name="poet"),
        ModelSettings(name="other:v2", alias="chat"),
        ModelSettings(name=f"{NAME.repo_id}@{commit}", alias="pinned"),
    )
    chosen = Settings(models=models, installed=True)
    entries = [build_entry(one, complete_config(store.find(one.name)), chosen) for one in models]

    async def delete_all() -> None:
        library = InstalledModels(ModelRegistry(entries, chosen))
        for name in (
            "poet",
            "poet:latest",
            "library/poet",
            "registry.ollama.ai/library/poet:latest",
            "chat:latest",
            "library/chat",
            "other:v2",
            "library/other:v2",
            NAME.repo_id,
        ):
            with pytest.raises(AppError, match="named when the server was started"):
                await library.delete(name)
        await library.delete("library/third:latest")

    asyncio.run(delete_all())
    for model in models:
        assert store.resolve(model.name).weight_bytes > 0


def test_a_server_of_named_models_only_installs_nothing(use):
    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        for work in (library.pull("a/b"), library.create(recipe())):
            with pytest.raises(AppError, match="--installed"):
                await collect(work)

    use(body, installed=False)


def test_a_downloaded_model_can_be_deleted(use, hub: StandIn, commit: str):  # noqa: F811
    async def body(library: InstalledModels, registry: ModelRegistry) -> None:
        await collect(library.pull(NAME.repo_id))
        await library.delete(NAME.repo_id)
        assert registry.find(NAME.repo_id) is None
        with pytest.raises(AppError, match="not found"):
            await library.delete(NAME.repo_id)

    use(body)


NAMES = st.text(st.sampled_from("ab./\\:@~-_\0 \n%é"), max_size=24) | st.sampled_from(
    ["../../x", "a/../../b", "..", "a:..", "/etc/passwd", "~/x", "a/b/../../../c:d", "C:\\x"]
)


@given(name=NAMES)
@settings(max_examples=40, deadline=None, suppress_health_check=[SHORT])
def test_no_name_resolves_to_a_path_outside_the_store(use, tmp_path: Path, name: str):
    """Whatever the name, nothing outside of the store appears or goes away."""
    outside = tmp_path / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "precious").write_text("x")

    def others() -> set[str]:
        return {
            name for name in files_below(tmp_path) if not name.startswith(("ollama/", "cache/"))
        }

    before = others()

    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        for work in (
            lambda: collect(library.create(recipe(name=name, files={name: f"sha256:{'0' * 64}"}))),
            lambda: library.copy("base", name),
            lambda: library.delete(name),
            lambda: library.has_blob(name),
            lambda: library.has_blob(f"sha256:{name}"),
        ):
            await is_refused(work)

    use(body)
    assert others() == before


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_an_upload_is_stored_completely_or_not_at_all(use, tmp_path: Path):
    content = b"x" * 100_000

    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        async with library.upload_blob(digest(content)) as blob:
            await blob.write(content[:50_000])
            with pytest.raises(AppError, match="another upload is running"):
                await upload(library, digest(b"y"), b"y")
            assert not await library.has_blob(digest(content))
            await blob.write(content[50_000:])
            await blob.commit()
        assert await library.has_blob(digest(content))
        with pytest.raises(AppError, match="digest mismatch, expected"):
            await upload(library, digest(b"other"), content)
        async with library.upload_blob(digest(b"z")) as blob:
            await blob.write(b"z")  # and disconnects

    use(body)
    [name] = files_below(tmp_path / "ollama" / "blobs")
    assert name == digest(content).replace(":", "-")


def test_an_upload_that_would_fill_the_disk_is_refused(use, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "RESERVED_BYTES", 1 << 60)

    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        with pytest.raises(AppError, match="free some space") as caught:
            await upload(library, digest(b"x"), b"x")
        assert caught.value.kind is ErrorKind.TOO_LARGE

    use(body)


def test_uploads_that_no_model_uses_are_deleted_after_a_day(
    use, base: ModelSettings, tmp_path: Path
):
    """And neither those that one uses, nor what Ollama itself downloads."""
    folder = Path(base.name)
    used = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in (".json", ".safetensors")
    }

    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        for content in (*used.values(), b"unused"):
            await upload(library, digest(content), content)
        files = {name: digest(content) for name, content in used.items()}
        await collect(library.create(recipe(base=None, files=files)))

    use(body)
    blobs = tmp_path / "ollama" / "blobs"
    (blobs / f"sha256-{'f' * 64}").write_bytes(b"of Ollama")
    os.utime(blobs / f"sha256-{'f' * 64}", (0, 0))
    assert writer.delete_unused_uploads() == 0
    assert writer.delete_unused_uploads(time.time() + writer.MAX_UNUSED_SECONDS + 60) == 1
    assert not (blobs / digest(b"unused").replace(":", "-")).exists()
    assert (blobs / f"sha256-{'f' * 64}").exists()
    assert store.resolve("poet").weight_bytes > 0


def test_the_sweep_runs_by_itself(use, tmp_path: Path):
    old = tmp_path / "ollama" / "blobs" / f"{writer.TEMPORARY_PREFIX}of-a-crash"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"half")
    os.utime(old, (0, 0))

    async def body(library: InstalledModels, _: ModelRegistry) -> None:
        async with library.sweep_uploads():
            await wait_until_async(lambda: not old.exists())

    use(body)
