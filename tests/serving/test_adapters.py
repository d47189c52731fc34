"""Adapters that are loaded and unloaded while the server runs, over a real pool and engine."""

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.events import TextDelta
from app.core.ports import Runner
from app.core.requests import GenerateRequest
from app.core.settings import Settings
from app.runners.process_runner import ProcessRunner
from app.runners.thread_runner import ThreadRunner
from app.serving.router import ModelRouter
from tests import tiny
from tests.engine.test_adapters import write_adapter, write_unusable
from tests.serving.test_router import (
    build_request,
    events,
    join_text,
    load,
    open_stream,
    unload,
    with_router,
)
from tests.waiting import wait_until_async

Use = Callable[[ModelRouter], Awaitable[Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a long context, and adapters x and y."""
    root = tmp_path_factory.mktemp("adapters")
    tiny.write(root / "a", max_position_embeddings=tiny.LONG)
    for index, name in enumerate("xy"):
        write_adapter(root / name, index)
    return root


def run(root: Path, use: Use, runner: Callable[[Settings], Runner] = ThreadRunner) -> Any:
    return with_router(root, use, names="a", runner=runner, context=512, parallel=4)


async def load_adapter(router: ModelRouter, name: str, path: Path, *, in_place: bool = False):
    await router.load_adapter(await router.resolve("a"), name, str(path), in_place=in_place)


async def unload_adapter(router: ModelRouter, name: str) -> None:
    await router.unload_adapter(await router.resolve("a"), name)


def weights(router: ModelRouter) -> int:
    return router.list_model_states()[0].stats.ledger.weights


def list_names(router: ModelRouter) -> list[str]:
    return [card.id for card in router.list_models()]


async def answer(router: ModelRouter, name: str) -> str:
    return join_text(await events(router, build_request(name)))


async def read_error(wait: Awaitable[Any]) -> tuple[ErrorKind, str | None, str]:
    with pytest.raises(AppError) as caught:
        await wait
    return caught.value.kind, caught.value.param, caught.value.message


def build_long(name: str) -> GenerateRequest:
    """Runs until it is cancelled, or for 400 tokens."""
    sampling = {"temperature": 0.0, "logit_bias": ((tiny.END, -100.0),)}
    return build_request(name, sampling=sampling, max_tokens=400)


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, str]:
    """The answers of the model and of each adapter, in servers with one adapter at most."""

    async def use(router: ModelRouter) -> dict[str, str]:
        found = {"": await answer(router, "a")}
        for name in "xy":
            await load_adapter(router, name, root / name)
            found[name] = await answer(router, name)
            await unload_adapter(router, name)
        return found

    found = run(root, use)
    assert len(set(found.values())) == 3
    return found


@pytest.mark.parametrize("runner", [ThreadRunner, ProcessRunner])
def test_an_adapter_can_be_requested_until_it_is_unloaded(
    root: Path, alone: dict[str, str], runner: Callable[[Settings], Runner]
) -> None:
    async def use(router: ModelRouter) -> None:
        before = weights(router)
        base = router.list_models()[0].system_fingerprint
        await load_adapter(router, "x", root / "x")
        assert weights(router) > before
        assert list_names(router) == ["a", "a:x"]
        assert [one.name for one in await router.list_details()] == ["a", "a:x"]
        prints = [card.system_fingerprint for card in router.list_models()]
        assert prints[0] == base != prints[1]
        assert [await answer(router, name) for name in ("a", "a:x", "x")] == [
            alone[""],
            alone["x"],
            alone["x"],
        ]
        resolved = await router.resolve("x")
        await unload_adapter(router, "x")
        assert list_names(router) == ["a"]
        assert weights(router) == before
        assert (await read_error(router.resolve("a:x")))[0] is ErrorKind.MODEL_NOT_FOUND
        with pytest.raises(AppError) as caught:  # resolved before, opened after
            async with router.open(build_request("x"), resolved):
                pass
        assert (caught.value.kind, caught.value.param) == (ErrorKind.MODEL_NOT_FOUND, "model")

    run(root, use, runner)


def test_requests_that_use_an_unloaded_adapter_finish(root: Path, alone: dict[str, str]) -> None:
    """Meanwhile, another one can have its name."""

    async def use(router: ModelRouter) -> None:
        await load_adapter(router, "x", root / "x")
        size = weights(router)
        expected = join_text(await events(router, build_long("x")))
        async with open_stream(router, build_long("x")) as stream:
            text = ""
            async for batch in stream:
                text += "".join(event.text for event in batch if isinstance(event, TextDelta))
                if text and len(text) < len(expected) and list_names(router) == ["a", "a:x"]:
                    await unload_adapter(router, "x")
                    assert list_names(router) == ["a"]
                    await load_adapter(router, "y", root / "y")
                    await load_adapter(router, "y", root / "x", in_place=True)
                    assert await answer(router, "y") == alone["x"]
                    assert weights(router) > size, "the adapter of the running request is loaded"
        assert text == expected
        await wait_until_async(lambda: weights(router) == size)
        assert await answer(router, "y") == alone["x"]

    run(root, use)


def test_an_adapter_is_replaced_in_place_for_new_requests(
    root: Path, alone: dict[str, str]
) -> None:
    async def use(router: ModelRouter) -> None:
        await load_adapter(router, "n", root / "x")
        kind, param, message = await read_error(load_adapter(router, "n", root / "y"))
        assert (kind, param) == (ErrorKind.INVALID, "lora_name")
        assert "load_inplace" in message
        old = router.list_models()[1].system_fingerprint
        await load_adapter(router, "n", root / "y", in_place=True)
        assert router.list_models()[1].system_fingerprint != old
        assert await answer(router, "n") == alone["y"]
        assert list_names(router) == ["a", "a:n"]

    run(root, use)


def test_what_cannot_be_loaded_changes_nothing(root: Path, alone: dict[str, str]) -> None:
    for kind in ("rank", "model", "numbers", "file"):
        write_unusable(root / "unusable" / kind, kind)

    async def use(router: ModelRouter) -> None:
        await load_adapter(router, "x", root / "x")
        before = weights(router)
        for path in sorted((root / "unusable").iterdir()):
            kind, param, message = await read_error(load_adapter(router, "z", path))
            assert (kind, param) == (ErrorKind.INVALID, "lora_path"), message
            failed = await read_error(load_adapter(router, "x", path, in_place=True))
            assert failed[0] is ErrorKind.INVALID
        kind, param, _ = await read_error(load_adapter(router, "z", root / "none"))
        assert (kind, param) == (ErrorKind.MODEL_NOT_FOUND, "lora_path")
        for name in ("", "a:b", "é", "x" * 65):
            kind, param, _ = await read_error(load_adapter(router, name, root / "x"))
            assert (kind, param) == (ErrorKind.INVALID, "lora_name")
        kind, param, _ = await read_error(unload_adapter(router, "z"))
        assert (kind, param) == (ErrorKind.MODEL_NOT_FOUND, "lora_name")
        assert weights(router) == before
        assert list_names(router) == ["a", "a:x"]
        assert await answer(router, "x") == alone["x"]

    run(root, use)


def test_a_model_that_is_loaded_again_has_its_adapters(root: Path, alone: dict[str, str]) -> None:
    """After an unload, and after a crash of its process."""

    async def use(router: ModelRouter) -> None:
        for name in "xy":
            await load_adapter(router, name, root / name)
        await unload_adapter(router, "y")
        size = weights(router)
        await unload(router, "a")
        assert list_names(router) == ["a", "a:x"]
        assert await answer(router, "x") == alone["x"]
        pid = router.list_model_states()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await wait_until_async(lambda: router.list_model_states()[0].pid != pid)
        assert await answer(router, "x") == alone["x"]
        assert weights(router) == size

    run(root, use, ProcessRunner)


def test_an_adapter_whose_files_are_gone_does_not_prevent_a_load(
    root: Path, alone: dict[str, str], tmp_path: Path
) -> None:
    async def use(router: ModelRouter) -> None:
        shutil.copytree(root / "x", tmp_path / "x")
        await load_adapter(router, "x", tmp_path / "x")
        shutil.rmtree(tmp_path / "x")
        await unload(router, "a")
        await load(router, "a")
        assert await answer(router, "a") == alone[""]
        assert "load it again" in (await read_error(events(router, build_request("x"))))[2]
        await load_adapter(router, "x", root / "x", in_place=True)
        assert await answer(router, "x") == alone["x"]

    run(root, use)


def test_a_change_is_completed_if_the_client_disconnects(root: Path) -> None:
    async def use(router: ModelRouter) -> None:
        task = asyncio.create_task(load_adapter(router, "x", root / "x"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until_async(lambda: list_names(router) == ["a", "a:x"])

    run(root, use)
