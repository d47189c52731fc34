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
from app.core.embeddings import Embeddings, EmbedInput, EmbedRequest
from app.core.errors import AppError, ErrorKind
from app.core.events import Event, Finish, ModelLoading, PromptTokenIds, TextDelta
from app.core.jobs import EngineStats, Ledger
from app.core.model_files import ModelFiles
from app.core.model_state import MemoryRequirement, ModelState
from app.core.ports import Runner
from app.core.requests import Conversation, GenerateRequest, Message, Regex
from app.core.settings import ModelSettings, Settings
from app.core.thread_pools import ThreadPools
from app.engine.loop import Loop
from app.engine.model_info import complete_config
from app.grammar.compiler import GrammarCompiler
from app.runners.pool import ModelPool
from app.runners.thread_runner import ThreadRunner
from app.runners.tokenizer_check import TokenizerChecker
from app.serving.registry import ModelRegistry, RegisteredModel, build_entry
from app.serving.router import ModelRouter, sum_engine_stats
from tests import tiny

MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models that say different things."""
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
    **settings: Any,
) -> Any:
    """Room for two of the three, of those that are not too big. num_others: further models that are
    registered and not loaded."""
    chosen = Settings(
        models=tuple(ModelSettings(name=str(folder / name)) for name in names), **settings
    )
    entries = [build_entry(m, complete_config(store.find(m.name)), chosen) for m in chosen.models]
    last = entries[-1]
    for number in range(num_others):
        name = f"other-{number}"
        served, files = replace(last.served, name=name), replace(last.files, name=name)
        entries.append(RegisteredModel(served=served, files=files))

    async def need(files: ModelFiles, settings: Settings, held: int) -> MemoryRequirement:
        bytes_ = (1000 if files.name in too_big else 40) * MEBIBYTE
        return MemoryRequirement(min_bytes=bytes_, preferred_bytes=bytes_, device_budget=0)

    async def run() -> Any:
        registry = ModelRegistry(entries, chosen)
        pool = ModelPool(
            lambda own: runner(replace(own, models=own.models[:1])),
            registry.load_verified_files,
            need,
            total_bytes=100 * MEBIBYTE,
        )
        router = ModelRouter(
            registry,
            pool,
            list(preload),
            ThreadPools(),
            load_wait=chosen.load_wait,
            check_tokenizer=TokenizerChecker(store.is_builtin).check,
        )
        await pool.start()
        try:
            await router.preload_models()
            return await use(router)
        finally:
            await pool.stop()

    return asyncio.run(run())


def wish(model: str, **changes: Any) -> GenerateRequest:
    asked = {"prompt": "hello", "sampling": {"temperature": 0.0}, "max_tokens": 12}
    return GenerateRequest(model=model, **{**asked, **changes})


@asynccontextmanager
async def open_stream(router: ModelRouter, request: GenerateRequest) -> AsyncGenerator[Any]:
    async with router.open(request, await router.resolve(request.model)) as stream:
        yield stream


async def events(router: ModelRouter, request: GenerateRequest) -> list[Event]:
    async with open_stream(router, request) as stream:
        return [event async for event in stream]


async def embed(router: ModelRouter, model: str, content: str = "x", **fields: Any) -> Embeddings:
    inputs = (EmbedInput(content=content, param="input"),)
    request = EmbedRequest(model=model, inputs=inputs, **fields)
    return await router.embed(request, await router.resolve(model))


async def load(router: ModelRouter, model: str, keep_alive: float | None = None) -> ModelState:
    return await router.load(await router.resolve(model), keep_alive)


async def unload(router: ModelRouter, model: str) -> ModelState:
    return await router.unload(await router.resolve(model))


def text(events: list[Event]) -> str:
    assert isinstance(events[-1], Finish)
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_each_model_gives_its_own_answer_whatever_had_to_leave_for_it(folder: Path) -> None:
    async def use(router: ModelRouter) -> list[str]:
        said = [text(await events(router, wish(name))) for name in "abcabccba"]
        assert sum(state.phase == "ready" for state in router.list_model_states()) == 2
        return said

    said = with_router(folder, use)
    a, b, c = said[:3]
    assert len({a, b, c}) == 3
    assert said == [a, b, c, a, b, c, c, b, a]


def test_many_at_once_get_the_right_model(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        alone = {name: text(await events(router, wish(name))) for name in "abc"}
        asked = "abcbca" * 3
        said = await asyncio.gather(*(events(router, wish(name)) for name in asked))
        assert [text(one) for one in said] == [alone[name] for name in asked]

    with_router(folder, use)


def test_who_waits_for_a_model_is_told(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        first = await events(router, wish("b"))
        assert isinstance(first[0], ModelLoading)
        assert not any(isinstance(event, ModelLoading) for event in await events(router, wish("b")))

    with_router(folder, use)


def test_leaving_while_the_model_is_loaded_harms_nobody(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        async with open_stream(router, wish("b")) as stream:
            await anext(stream)
        assert text(await events(router, wish("b")))
        assert {state.leases for state in router.list_model_states()} == {0}

    with_router(folder, use)


def test_a_model_that_nobody_has_is_not_found(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        for name in ("d", "a:8b", "", "../../etc", "x" * 5000):
            with pytest.raises(AppError) as caught:
                await router.resolve(name)
            assert (caught.value.kind, caught.value.param) == (ErrorKind.MODEL_NOT_FOUND, "model")
            assert len(caught.value.message) < 400

    with_router(folder, use)


def test_a_model_is_resolved_by_its_name_also_with_ollamas_tag(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        for asked, name in (("a", "a"), ("a:latest", "a"), ("c:latest", "c"), (None, "a")):
            model = await router.resolve(asked)
            assert model.card == next(card for card in router.list_models() if card.id == name)
            assert router.model_state(model).name == name

    with_router(folder, use)


def test_without_any_model_there_is_no_own_choice_yet() -> None:
    """As with --installed before the first look at the disk."""

    async def need(files: ModelFiles, settings: Settings, held: int) -> MemoryRequirement:
        raise AssertionError("no model is loaded here")

    async def run() -> None:
        registry = ModelRegistry([], Settings())
        pool = ModelPool(ThreadRunner, registry.load_verified_files, need, total_bytes=1)
        check = TokenizerChecker(store.is_builtin).check
        router = ModelRouter(
            registry, pool, [], ThreadPools(), load_wait=1.0, check_tokenizer=check
        )
        with pytest.raises(AppError) as caught:
            await router.resolve(None)
        assert caught.value.kind is ErrorKind.LOADING

    asyncio.run(run())


def test_what_can_be_refused_at_once_is_not_told_to_wait_first(folder: Path) -> None:
    """What is raised before anything is said becomes a status, which clients act on."""

    async def use(router: ModelRouter) -> None:
        async with open_stream(router, wish("b")):
            with pytest.raises(
                AppError, match="1 requests are already waiting for b to load"
            ) as caught:
                async with open_stream(router, wish("b")):
                    raise AssertionError("it has been opened")
            assert caught.value.kind is ErrorKind.BUSY

    with_router(folder, use, max_queue=1)


def test_whoever_asks_for_vectors_does_not_wait_longer_than_was_said(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        with pytest.raises(AppError, match="still loading") as caught:
            await embed(router, "b")
        assert (caught.value.kind, caught.value.retry_after) == (ErrorKind.LOADING, 10)

    with_router(folder, use, load_wait=0.0)


def test_only_of_models_in_memory_it_is_kept_how_they_read_and_write(folder: Path) -> None:
    """One that is asked for and never gets there would keep its tokenizer for ever."""

    async def use(router: ModelRouter) -> None:
        for name in "bcb":
            with pytest.raises(AppError, match="needs"):
                await events(router, wish(name))
            with pytest.raises(AppError, match="needs"):
                await load(router, name)
            await router.tokenize(await router.resolve(name), "x")
        assert text(await events(router, wish("a")))
        assert list(router._generations) == ["a"]

    with_router(folder, use, too_big="bc")


def test_a_model_that_changed_on_the_disk_is_read_and_written_as_it_is_now(tmp_path: Path) -> None:
    """Also by those who came while what was there before was still on its way out."""
    for name in "abc":
        tiny.write(tmp_path / name)
    tokenizer = tmp_path / "a" / "tokenizer.json"

    async def asked(router: ModelRouter) -> tuple[int, ...]:
        said = await events(router, wish("a", return_token_ids=True))
        return next(event.token_ids for event in said if isinstance(event, PromptTokenIds))

    async def use(router: ModelRouter) -> None:
        before = await asked(router)
        async with open_stream(router, wish("a")) as stream:
            await anext(stream)
            leaving = asyncio.create_task(unload(router, "a"))
            await asyncio.sleep(0)
            late = asyncio.create_task(asked(router))
            await asyncio.sleep(0.05)
            changed = json.loads(tokenizer.read_text())
            changed["normalizer"] = {"type": "Prepend", "prepend": "x"}
            tokenizer.write_text(json.dumps(changed))
        await leaving
        assert await late == (ord("x"), *before)

    with_router(tmp_path, use)


def test_a_wrong_request_is_refused_also_if_its_model_had_to_be_loaded(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        for _ in range(2):
            with pytest.raises(AppError) as caught:
                await events(router, wish("b", prompt="x" * 100_000))
            assert caught.value.kind is ErrorKind.CONTEXT_LENGTH

    with_router(folder, use)


def test_vectors_come_from_the_model_that_was_asked(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        found: list[bytes] = []
        for name in "ab":
            found += (await embed(router, name)).vectors
        assert found[0] != found[1]

    with_router(folder, use)


def test_text_becomes_ids_without_a_model_in_memory(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        a, c = await router.resolve(None), await router.resolve("c")
        assert await router.tokenize(a, "hi") == await router.tokenize(c, "hi") == [104, 105]
        assert await router.detokenize(c, [104, 105]) == "hi"
        assert await router.get_token_bytes(c, [104, 105]) == [b"h", b"i"]
        assert (await router.get_tokenizer_info(c))["eos_token"] == "</s>"
        said = Conversation(messages=(Message(role="user", content="hi"),))
        ids = await router.tokenize_chat(c, GenerateRequest(model="c", prompt=said))
        assert bytes(ids) == b"user: hi\nassistant: "
        assert router.list_model_states()[2].phase == "unloaded"

    with_router(folder, use)


def test_models_are_loaded_and_unloaded_on_demand(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        loaded = await load(router, "b", math.inf)
        assert (loaded.name, loaded.phase, loaded.expires_at) == ("b", "ready", None)
        assert (await unload(router, "b")).phase == "unloaded"
        assert text(await events(router, wish("b")))

    with_router(folder, use)


def test_the_latest_word_counts_for_how_long_a_model_stays(folder: Path) -> None:
    async def use(router: ModelRouter) -> None:
        await events(router, wish("a", keep_alive=500.0, admin=True))
        assert router.list_model_states()[0].expires_at is not None
        await events(router, wish("a", keep_alive=math.inf))
        assert router.list_model_states()[0].expires_at is None
        await events(router, wish("a", keep_alive=0.0))
        await asyncio.sleep(0.2)
        assert router.list_model_states()[0].phase == "ready"
        await events(router, wish("a", keep_alive=0.0, admin=True))
        async with asyncio.timeout(20):
            while router.list_model_states()[0].phase != "unloaded":  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)

    with_router(folder, use)


def test_a_request_that_is_refused_says_nothing_of_how_long_a_model_stays(folder: Path) -> None:
    """It unloaded the model, though it was answered with 400."""

    async def use(router: ModelRouter) -> None:
        async def refused(asked: Awaitable[object]) -> None:
            with pytest.raises(AppError) as caught:
                await asked
            assert caught.value.kind in (ErrorKind.INVALID, ErrorKind.CONTEXT_LENGTH)

        leaves: Any = {"keep_alive": 0.0, "admin": True}
        for name in "ab":
            # the first is in memory already, the other one is loaded for it
            await refused(events(router, wish(name, prompt="x" * 5000, **leaves)))
            await refused(
                events(router, wish(name, sampling={"logit_bias": ((999, 1),)}, **leaves))
            )
            await refused(embed(router, name, "x" * 5000, **leaves))
        await asyncio.sleep(0.2)
        assert [state.phase for state in router.list_model_states()] == [
            "ready",
            "ready",
            "unloaded",
        ]
        await embed(router, "a", **leaves)
        async with asyncio.timeout(20):
            while router.list_model_states()[0].phase != "unloaded":  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)

    with_router(folder, use)


def test_the_fingerprint_changes_when_the_weights_are_replaced(tmp_path: Path) -> None:
    """With weights of the same names, shapes and size, between two loads of one server."""
    for seed, name in enumerate("abc"):
        tiny.write(tmp_path / name, seed=seed)

    async def use(router: ModelRouter) -> None:
        async def fingerprints() -> tuple[str, str]:
            before = (await router.resolve("a")).card.system_fingerprint
            await events(router, wish("a"))
            return before, router.list_models()[0].system_fingerprint

        old = await fingerprints()
        assert old[0] == old[1]
        tiny.write(tmp_path / "a", seed=7)
        assert await fingerprints() == old, "what is in memory is as it was"
        await unload(router, "a")
        new = await fingerprints()
        assert new[0] == new[1] != old[0]
        await unload(router, "a")
        assert await fingerprints() == new, "nothing was replaced"

    with_router(tmp_path, use)


def test_cards_tell_what_is_served_and_the_server_is_as_its_preloaded_models_are(
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


def test_a_preloaded_model_that_cannot_be_loaded_is_told(folder: Path, tmp_path: Path) -> None:
    for name in "abc":
        tiny.write(tmp_path / name)
    shard = tmp_path / "a" / "model.safetensors"
    whole = shard.read_bytes()

    async def use(router: ModelRouter) -> None:
        shard.write_bytes(b"garbage")
        await unload(router, "a")
        with pytest.raises(AppError, match="safetensors"):
            await load(router, "a")
        assert text(await events(router, wish("b")))
        shard.write_bytes(whole)
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


async def failures(router: ModelRouter, name: str, **changes: Any) -> list[str]:
    """All that a client gets to know of a request for this model that fails: of an answer, of
    vectors, of a load, and of the model's state."""
    found: list[str] = []
    for call in (
        lambda: events(router, wish(name, **changes)),
        lambda: embed(router, name),
        lambda: load(router, name),
    ):
        try:
            await call()
        except AppError as error:
            found.append(error.message)
        states = [state.error for state in router.list_model_states()]
        found += [error for error in (*states, router.status().error) if error is not None]
    return found


@pytest.mark.parametrize("broken", ["tokenizer", "weights", "template", "gone", "engine"])
def test_no_failure_of_a_model_reveals_a_path(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure names the file, and the log has its path."""
    for name in "abc":
        tiny.write(tmp_path / name)

    def die(_: Loop) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "/opt/secret/libx.so")

    monkeypatch.setattr(GrammarCompiler, "preload_tokenizer", lambda _: None)

    async def use(router: ModelRouter) -> list[str]:
        assert text(await events(router, wish("a")))
        asked: dict[str, Any] = {}
        match broken:
            case "tokenizer":  # read by the first compilation, as where the warm-up is slow
                (tmp_path / "a" / "tokenizer.json").write_text("{}")
                asked["grammar"] = Regex(pattern="a+")
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
        return await failures(router, "a", **asked)

    found = with_router(tmp_path, use)
    assert found
    for message in found:
        assert str(tmp_path) not in message
        assert "/opt" not in message
        assert "secret" not in message
    named = {
        "tokenizer": "tokenizer.json",
        "weights": "model.safetensors",
        "template": "tokenizer_config.json",
        "gone": "a",
        "engine": "libx.so",
    }
    assert named[broken] in found[0]


def test_figures_of_several_engines_add_up() -> None:
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
    both = sum_engine_stats([one, two])
    assert (both.allocated_bytes, both.steps) == (11, 22)
    assert both.prefix_hit_counts == (3,) * 9
    assert dict(both.prefix_miss_counts) == {"empty": 6, "diverged": 2}
    assert (both.ledger.budget, both.ledger.weights) == (10, 4)
    assert sum_engine_stats([]) == EngineStats()


def test_whoever_asks_for_a_load_does_not_wait_out_a_refusal(tmp_path: Path) -> None:
    """An operator who has mended the files wants to see that at once."""
    for name in "abc":
        tiny.write(tmp_path / name)
    shard = tmp_path / "b" / "model.safetensors"
    whole = shard.read_bytes()

    async def use(router: ModelRouter) -> None:
        shard.write_bytes(b"garbage")
        for _ in range(5):
            with pytest.raises(AppError) as caught:
                await load(router, "b")
            assert str(tmp_path) not in caught.value.message
        shard.write_bytes(whole)
        assert (await load(router, "b")).phase == "ready"

    with_router(tmp_path, use)
