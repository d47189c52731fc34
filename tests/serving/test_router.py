"""Several models behind one `Generate`, over a real pool and real engines."""

import asyncio
import json
import math
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import store
from app.core.errors import AppError, ErrorKind
from app.core.events import Event, Finish, ModelLoading, PromptTokenIds, TextDelta
from app.core.jobs import EngineStats, Ledger
from app.core.model_files import ModelFiles
from app.core.models import MemoryRequirement, ModelState
from app.core.ports import Runner
from app.core.request_lifecycle import RequestLimits
from app.core.requests import (
    Conversation,
    Embeddings,
    EmbedInput,
    EmbedRequest,
    GenerateRequest,
    Message,
    Regex,
)
from app.core.settings import AdapterSettings, ModelSettings, Settings
from app.core.thread_pools import ThreadPools
from app.engine.loop import Loop
from app.engine.model_info import complete_config
from app.grammar.compiler import GrammarCompiler
from app.runners.pool import ModelPool
from app.runners.thread_runner import ThreadRunner
from app.serving.model_library import InstalledModels
from app.serving.registry import ModelRegistry, RegisteredModel, build_entry
from app.serving.router import ModelRouter, sum_engine_stats
from tests import tiny
from tests.batches import flatten
from tests.engine.test_adapters import write_adapter
from tests.serving.in_process import accept_tokenizer

MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models with different weights."""
    root = tmp_path_factory.mktemp("router")
    for seed, name in enumerate("abc"):
        tiny.write(root / name, seed=seed)
    return root


def with_router(
    folder: Path,
    use: Callable[[ModelRouter], Awaitable[Any]],
    *,
    names: str = "abc",
    num_others: int = 0,
    preload: str = "a",
    too_big: str = "",
    runner: Callable[[Settings], Runner] = ThreadRunner,
    limits: RequestLimits | None = None,
    **settings: Any,
) -> Any:
    """Run `use` with a router whose memory fits two of the three models. too_big: models that do
    not fit. num_others: further registered models, which are not loaded."""
    all_settings = Settings(
        models=tuple(ModelSettings(name=str(folder / name)) for name in names), **settings
    )
    entries = [
        build_entry(m, complete_config(store.find(m.name)), all_settings)
        for m in all_settings.models
    ]
    last = entries[-1]
    for number in range(num_others):
        name = f"other-{number}"
        served, files = replace(last.served, name=name), replace(last.files, name=name)
        entries.append(RegisteredModel(served=served, files=files))

    async def measure(files: ModelFiles, settings: Settings, held_bytes: int) -> MemoryRequirement:
        bytes_ = (1000 if files.name in too_big else 40) * MEBIBYTE
        return MemoryRequirement(min_bytes=bytes_, preferred_bytes=bytes_, device_budget=0)

    async def run() -> Any:
        registry = ModelRegistry(entries, all_settings)
        pool = ModelPool(
            lambda settings_of_model: runner(
                replace(settings_of_model, models=settings_of_model.models[:1])
            ),
            registry.load_verified_files,
            measure,
            total_bytes=100 * MEBIBYTE,
        )
        router = ModelRouter(
            registry,
            pool,
            list(preload),
            ThreadPools(),
            load_wait=all_settings.load_wait,
            check_tokenizer=accept_tokenizer,
            library=InstalledModels(registry),
            limits=limits,
        )
        await pool.start()
        try:
            await router.preload_models()
            return await use(router)
        finally:
            await pool.stop()

    return asyncio.run(run())


def build_request(model: str, **changes: Any) -> GenerateRequest:
    defaults = {"prompt": "hello", "sampling": {"temperature": 0.0}, "max_tokens": 12}
    return GenerateRequest(model=model, **{**defaults, **changes})


@asynccontextmanager
async def open_stream(router: ModelRouter, request: GenerateRequest) -> AsyncGenerator[Any]:
    async with router.open(request, await router.resolve(request.model)) as stream:
        yield stream


async def events(router: ModelRouter, request: GenerateRequest) -> list[Event]:
    async with open_stream(router, request) as stream:
        return [event async for event in flatten(stream)]


async def embed(router: ModelRouter, model: str, content: str = "x", **fields: Any) -> Embeddings:
    inputs = (EmbedInput(content=content, param="input"),)
    request = EmbedRequest(model=model, inputs=inputs, **fields)
    return await router.embed(request, await router.resolve(model))


async def load(router: ModelRouter, model: str, keep_alive: float | None = None) -> ModelState:
    return await router.load(await router.resolve(model), keep_alive)


async def unload(router: ModelRouter, model: str) -> ModelState:
    return await router.unload(await router.resolve(model))


def join_text(events: list[Event]) -> str:
    assert isinstance(events[-1], Finish)
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_each_model_gives_its_own_answer_with_evictions(folder: Path) -> None:
    async def use(router: ModelRouter) -> list[str]:
        texts = [join_text(await events(router, build_request(name))) for name in "abcabccba"]
        assert sum(state.phase == "ready" for state in router.list_model_states()) == 2
        return texts

    texts = with_router(folder, use)
    a, b, c = texts[:3]
    assert len({a, b, c}) == 3
    assert texts == [a, b, c, a, b, c, c, b, a]


def test_concurrent_requests_get_the_right_model(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        expected = {name: join_text(await events(router, build_request(name))) for name in "abc"}
        names = "abcbca" * 3
        answers = await asyncio.gather(*(events(router, build_request(name)) for name in names))
        assert [join_text(one) for one in answers] == [expected[name] for name in names]

    with_router(folder, use)


def test_a_stream_reports_the_load_of_its_model(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        first = await events(router, build_request("b"))
        assert isinstance(first[0], ModelLoading)
        assert not any(
            isinstance(event, ModelLoading) for event in await events(router, build_request("b"))
        )

    with_router(folder, use)


def test_a_disconnect_during_the_load_releases_the_lease(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        async with open_stream(router, build_request("b")) as stream:
            await anext(stream)
        assert join_text(await events(router, build_request("b")))
        assert {state.leases for state in router.list_model_states()} == {0}

    with_router(folder, use)


def test_an_unknown_model_is_not_found(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        for name in ("d", "a:8b", "", "../../etc", "x" * 5000):
            with pytest.raises(AppError) as caught:
                await router.resolve(name)
            assert (caught.value.kind, caught.value.param) == (ErrorKind.MODEL_NOT_FOUND, "model")
            assert len(caught.value.message) < 400

    with_router(folder, use)


def test_a_model_is_resolved_by_its_name_with_and_without_ollamas_tag(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        for requested, name in (("a", "a"), ("a:latest", "a"), ("c:latest", "c"), (None, "a")):
            model = await router.resolve(requested)
            assert model.card == next(card for card in router.list_models() if card.id == name)
            assert router.model_state(model).name == name

    with_router(folder, use)


def test_without_any_model_there_is_no_default_yet() -> None:
    """As with --installed before the first scan of the disk."""

    async def measure(files: ModelFiles, settings: Settings, held_bytes: int) -> MemoryRequirement:
        raise AssertionError("no model is loaded in this test")

    async def run() -> None:
        registry = ModelRegistry([], Settings())
        pool = ModelPool(ThreadRunner, registry.load_verified_files, measure, total_bytes=1)
        router = ModelRouter(
            registry,
            pool,
            [],
            ThreadPools(),
            load_wait=1.0,
            check_tokenizer=accept_tokenizer,
            library=InstalledModels(registry),
        )
        with pytest.raises(AppError) as caught:
            await router.resolve(None)
        assert caught.value.kind is ErrorKind.LOADING

    asyncio.run(run())


def test_a_full_queue_is_rejected_before_the_load(folder: Path) -> None:
    """An error before the first event becomes a status, which clients act on."""

    async def use(router: ModelRouter) -> None:
        async with open_stream(router, build_request("b")):
            with pytest.raises(
                AppError, match="the queue for b, which is loading, already has 1 request;"
            ) as caught:
                async with open_stream(router, build_request("b")):
                    raise AssertionError("it has been opened")
            assert caught.value.kind is ErrorKind.BUSY

    with_router(folder, use, max_queue=1)


def test_embedding_requests_wait_for_a_model_only_load_wait_seconds(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        with pytest.raises(AppError, match="still loading") as caught:
            await embed(router, "b")
        assert (caught.value.kind, caught.value.retry_after) == (ErrorKind.LOADING, 10)

    with_router(folder, use, load_wait=0.0)


def test_tokenizers_are_cached_only_for_loaded_models(folder: Path) -> None:
    """A requested model that fails to load would keep its tokenizer in memory forever."""

    async def use(router: ModelRouter) -> None:
        for name in "bcb":
            with pytest.raises(AppError, match="needs"):
                await events(router, build_request(name))
            with pytest.raises(AppError, match="needs"):
                await load(router, name)
            await router.tokenize(await router.resolve(name), "x")
        assert join_text(await events(router, build_request("a")))
        assert list(router._generations) == ["a"]

    with_router(folder, use, too_big="bc")


def test_a_model_changed_on_disk_uses_its_new_tokenizer_after_the_reload(tmp_path: Path) -> None:
    """Also for requests that arrive while the old model is unloading."""
    for name in "abc":
        tiny.write(tmp_path / name)
    tokenizer = tmp_path / "a" / "tokenizer.json"

    async def get_token_ids(router: ModelRouter) -> tuple[int, ...]:
        received = await events(router, build_request("a", return_token_ids=True))
        return next(event.token_ids for event in received if isinstance(event, PromptTokenIds))

    async def use(router: ModelRouter) -> None:
        before = await get_token_ids(router)
        async with open_stream(router, build_request("a")) as stream:
            await anext(stream)
            unloading = asyncio.create_task(unload(router, "a"))
            await asyncio.sleep(0)
            reloaded = asyncio.create_task(get_token_ids(router))
            await asyncio.sleep(0.05)  # so that the request waits for the model
            changed = json.loads(tokenizer.read_text())
            changed["normalizer"] = {"type": "Prepend", "prepend": "x"}
            tokenizer.write_text(json.dumps(changed))
        await unloading
        assert await reloaded == (ord("x"), *before)

    with_router(tmp_path, use)


def test_an_invalid_request_is_rejected_after_the_load_too(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        for _ in range(2):
            with pytest.raises(AppError) as caught:
                await events(router, build_request("b", prompt="x" * 100_000))
            assert caught.value.kind is ErrorKind.CONTEXT_LENGTH

    with_router(folder, use)


def test_embeddings_come_from_the_requested_model(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        found: list[bytes] = []
        for name in "ab":
            found += (await embed(router, name)).vectors
        assert found[0] != found[1]

    with_router(folder, use)


def test_tokenization_does_not_load_the_model(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        a, c = await router.resolve(None), await router.resolve("c")
        assert await router.tokenize(a, "hi") == await router.tokenize(c, "hi") == [104, 105]
        assert await router.detokenize(c, [104, 105]) == "hi"
        assert await router.get_token_bytes(c, [104, 105]) == [b"h", b"i"]
        assert (await router.get_tokenizer_info(c))["eos_token"] == "</s>"
        conversation = Conversation(messages=(Message(role="user", content="hi"),))
        ids = await router.tokenize_chat(c, GenerateRequest(model="c", prompt=conversation))
        assert bytes(ids) == b"user: hi\nassistant: "
        assert router.list_model_states()[2].phase == "unloaded"

    with_router(folder, use)


def test_the_deadline_and_shutdown_end_other_requests_too(folder: Path) -> None:
    limits = RequestLimits(Settings())

    async def use(router: ModelRouter) -> None:
        model = await router.resolve("a")
        limits.apply(Settings(deadline=1e-9))
        with pytest.raises(AppError) as late:
            await router.tokenize(model, "hi")
        assert late.value.kind is ErrorKind.DEADLINE
        stopping = AppError(ErrorKind.STOPPING, "the server is shutting down")
        limits.abort_all(stopping)
        calls = (
            router.tokenize(model, "hi"),
            router.describe(model),
            router.list_details(),
            router.list_tensors(model),
            router.load(model),
            router.unload(model),
        )
        assert await asyncio.gather(*calls, return_exceptions=True) == [stopping] * len(calls)

    with_router(folder, use, limits=limits)


def test_models_are_loaded_and_unloaded_on_demand(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        loaded = await load(router, "b", math.inf)
        assert (loaded.name, loaded.phase, loaded.expires_at) == ("b", "ready", None)
        assert (await unload(router, "b")).phase == "unloaded"
        assert join_text(await events(router, build_request("b")))

    with_router(folder, use)


def test_the_latest_keep_alive_is_used(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        await events(router, build_request("a", keep_alive=500.0, admin=True))
        assert router.list_model_states()[0].expires_at is not None
        await events(router, build_request("a", keep_alive=math.inf))
        assert router.list_model_states()[0].expires_at is None
        await events(router, build_request("a", keep_alive=0.0))
        await asyncio.sleep(0.2)  # a shorter sleep could only miss an unload
        assert router.list_model_states()[0].phase == "ready"
        await events(router, build_request("a", keep_alive=0.0, admin=True))
        async with asyncio.timeout(20):
            while router.list_model_states()[0].phase != "unloaded":  # noqa: ASYNC110  # no event for it
                await asyncio.sleep(0.01)

    with_router(folder, use)


def test_a_rejected_request_does_not_change_the_keep_alive(folder: Path) -> None:
    """It unloaded the model, although its response was 400."""

    async def use(router: ModelRouter) -> None:
        async def expect_rejection(request: Awaitable[object]) -> None:
            with pytest.raises(AppError) as caught:
                await request
            assert caught.value.kind in (ErrorKind.INVALID, ErrorKind.CONTEXT_LENGTH)

        unload_after: Any = {"keep_alive": 0.0, "admin": True}
        for name in "ab":
            # the first model is loaded already, the second one is loaded for the request
            await expect_rejection(
                events(router, build_request(name, prompt="x" * 5000, **unload_after))
            )
            await expect_rejection(
                events(
                    router,
                    build_request(name, sampling={"logit_bias": ((999, 1),)}, **unload_after),
                )
            )
            await expect_rejection(embed(router, name, "x" * 5000, **unload_after))
        await asyncio.sleep(0.2)  # a shorter sleep could only miss an unload
        assert [state.phase for state in router.list_model_states()] == [
            "ready",
            "ready",
            "unloaded",
        ]
        await embed(router, "a", **unload_after)
        async with asyncio.timeout(20):
            while router.list_model_states()[0].phase != "unloaded":  # noqa: ASYNC110  # no event for it
                await asyncio.sleep(0.01)

    with_router(folder, use)


def test_the_fingerprint_changes_when_the_weights_are_replaced(tmp_path: Path) -> None:
    """With weights of the same names, shapes and size, between two loads."""
    for seed, name in enumerate("abc"):
        tiny.write(tmp_path / name, seed=seed)

    async def use(router: ModelRouter) -> None:
        async def fingerprints() -> tuple[str, str]:
            before = (await router.resolve("a")).card.system_fingerprint
            await events(router, build_request("a"))
            return before, router.list_models()[0].system_fingerprint

        old = await fingerprints()
        assert old[0] == old[1]
        tiny.write(tmp_path / "a", seed=7)
        assert await fingerprints() == old, "the loaded model is unchanged"
        await unload(router, "a")
        new = await fingerprints()
        assert new[0] == new[1] != old[0]
        await unload(router, "a")
        assert await fingerprints() == new, "nothing was replaced"

    with_router(tmp_path, use)


def test_cards_list_all_models_and_the_status_sums_the_loaded_ones(
    folder: Path,
) -> None:
    async def use(router: ModelRouter) -> None:
        cards = router.list_models()
        assert [card.id for card in cards] == ["a", "b", "c"]
        assert len({card.system_fingerprint for card in cards}) == 3
        assert {card.context_length for card in cards} == {4096}
        status = router.status()
        assert (status.state, status.progress) == ("ready", 100)
        assert status.stats.allocated_bytes == sum(
            state.stats.allocated_bytes for state in router.list_model_states()
        )
        assert status.capacity is not None

    with_router(folder, use)


def test_a_failed_load_is_an_error_and_can_be_retried(folder: Path, tmp_path: Path) -> None:
    for name in "abc":
        tiny.write(tmp_path / name)
    shard = tmp_path / "a" / "model.safetensors"
    original = shard.read_bytes()

    async def use(router: ModelRouter) -> None:
        shard.write_bytes(b"garbage")
        await unload(router, "a")
        with pytest.raises(AppError, match="safetensors"):
            await load(router, "a")
        assert join_text(await events(router, build_request("b")))
        shard.write_bytes(original)
        assert (await load(router, "a")).phase == "ready"

    with_router(tmp_path, use)


def test_a_server_whose_model_failed_to_load_is_not_ready_while_its_runner_stops(
    folder: Path,
) -> None:
    """`/health` answered 200 for as long as the runner of the failed load took to stop."""
    stopping = asyncio.Event()

    class Broken(ThreadRunner):
        async def start(self, files: ModelFiles) -> None:
            if broken:
                raise AppError(ErrorKind.MODEL_FILES, "planted")
            await super().start(files)

        async def stop(self) -> None:
            if broken:
                await stopping.wait()
            await super().stop()

    async def use(router: ModelRouter) -> None:
        nonlocal broken
        await unload(router, "a")
        assert router.status().state == "ready"
        broken = True
        with pytest.raises(AppError, match="planted"):
            await load(router, "a")
        phase, status = router.list_model_states()[0].phase, router.status()
        stopping.set()
        assert phase == "unloading"
        assert (status.state, status.error) == ("failed", "planted")

    broken = False
    with_router(folder, use, runner=Broken)


async def collect_error_messages(router: ModelRouter, name: str, **changes: Any) -> list[str]:
    """All error messages that a client gets for this model: from generation, embedding, loading,
    and the model's state."""
    messages: list[str] = []
    for call in (
        lambda: events(router, build_request(name, **changes)),
        lambda: embed(router, name),
        lambda: load(router, name),
    ):
        try:
            await call()
        except AppError as error:
            messages.append(error.message)
        states = [state.error for state in router.list_model_states()]
        messages += [error for error in (*states, router.status().error) if error is not None]
    return messages


@pytest.mark.product
@pytest.mark.parametrize("broken", ["tokenizer", "weights", "template", "gone", "engine"])
def test_no_failure_of_a_model_reveals_a_path(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error names the file; the log has its path."""
    for name in "abc":
        tiny.write(tmp_path / name)

    def die(_: Loop) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "/opt/secret/libx.so")

    monkeypatch.setattr(GrammarCompiler, "preload_tokenizer", lambda _: None)

    async def use(router: ModelRouter) -> list[str]:
        assert join_text(await events(router, build_request("a")))
        changes: dict[str, Any] = {}
        match broken:
            case "tokenizer":  # read by the first compilation, as if the warm-up were slow
                (tmp_path / "a" / "tokenizer.json").write_text("{}")
                changes["grammar"] = Regex(pattern="a+")
            case "weights":
                (tmp_path / "a" / "model.safetensors").write_bytes(b"garbage")
                await unload(router, "a")
            case "template":
                config = tmp_path / "a" / "tokenizer_config.json"
                config.write_text('{"chat_template": [1]}')
                await unload(router, "a")
            case "gone":
                shutil.rmtree(tmp_path / "a")
                await unload(router, "a")
            case _:
                monkeypatch.setattr(Loop, "step", die)
        return await collect_error_messages(router, "a", **changes)

    messages = with_router(tmp_path, use)
    assert messages
    for message in messages:
        assert str(tmp_path) not in message
        assert "/opt" not in message
        assert "secret" not in message
    expected = {
        "tokenizer": "tokenizer.json",
        "weights": "model.safetensors",
        "template": "tokenizer_config.json",
        "gone": "a",
        "engine": "libx.so",
    }
    assert expected[broken] in messages[0]


def test_stats_of_several_engines_are_summed() -> None:
    one = EngineStats(
        allocated_bytes=1,
        steps=2,
        prefix_hit_counts=(1,) * 9,
        prefix_miss_counts=(("empty", 1), ("diverged", 2)),
        ledger=Ledger(budget=10, weights=4),
    )
    two = EngineStats(
        allocated_bytes=10, steps=20, prefix_hit_counts=(2,) * 9, prefix_miss_counts=(("empty", 5),)
    )
    total = sum_engine_stats([one, two])
    assert (total.allocated_bytes, total.steps) == (11, 22)
    assert total.prefix_hit_counts == (3,) * 9
    assert dict(total.prefix_miss_counts) == {"empty": 6, "diverged": 2}
    assert (total.ledger.budget, total.ledger.weights) == (10, 4)
    assert sum_engine_stats([]) == EngineStats()


def test_an_explicit_load_ignores_the_backoff_of_failed_loads(tmp_path: Path) -> None:
    """An operator who has repaired the files expects an immediate retry."""
    for name in "abc":
        tiny.write(tmp_path / name)
    shard = tmp_path / "b" / "model.safetensors"
    original = shard.read_bytes()

    async def use(router: ModelRouter) -> None:
        shard.write_bytes(b"garbage")
        for _ in range(5):
            with pytest.raises(AppError) as caught:
                await load(router, "b")
            assert str(tmp_path) not in caught.value.message
        shard.write_bytes(original)
        assert (await load(router, "b")).phase == "ready"

    with_router(tmp_path, use)


class TestAdapters:
    """One model with two adapters."""

    @staticmethod
    def use(folder: Path, tmp_path: Path, use: Callable[[ModelRouter], Awaitable[Any]]) -> Any:
        adapters = tuple(
            AdapterSettings(name=name, path=str(write_adapter(tmp_path / name, index)))
            for index, name in enumerate("xy")
        )
        return with_router(folder, use, names="a", adapters=adapters)

    def test_every_name_of_an_adapter_selects_it(self, folder: Path, tmp_path: Path):
        async def use(router: ModelRouter) -> Any:
            names = ["a", "a:x", "x", "a:y", "a:y:latest"]
            cards = [(await router.resolve(name)).card for name in names]
            return [(card.id, card.parent) for card in cards]

        assert self.use(folder, tmp_path, use) == [
            ("a", None),
            ("a:x", "a"),
            ("a:x", "a"),
            ("a:y", "a"),
            ("a:y", "a"),
        ]

    def test_they_are_listed_after_the_model(self, folder: Path, tmp_path: Path):
        async def use(router: ModelRouter) -> Any:
            names = [card.id for card in router.list_models()]
            details = [(one.name, one.parent) for one in await router.list_details()]
            return names, details, [state.name for state in router.list_model_states()]

        names, details, states = self.use(folder, tmp_path, use)
        assert names == ["a", "a:x", "a:y"]
        assert details == [("a", ""), ("a:x", "a"), ("a:y", "a")]
        assert states == ["a"]

    def test_an_unknown_adapter_is_an_unknown_model(self, folder: Path, tmp_path: Path):
        async def use(router: ModelRouter) -> Any:
            with pytest.raises(AppError) as caught:
                await router.resolve("a:z")
            return caught.value.kind

        assert self.use(folder, tmp_path, use) is ErrorKind.MODEL_NOT_FOUND

    def test_an_adapter_has_no_embeddings(self, folder: Path, tmp_path: Path):
        async def use(router: ModelRouter) -> Any:
            request = EmbedRequest(model="a:x", inputs=(EmbedInput(content="a", param="input"),))
            with pytest.raises(AppError, match="request a") as caught:
                await router.embed(request, await router.resolve("a:x"))
            return caught.value.param

        assert self.use(folder, tmp_path, use) == "model"
