"""Descriptions of models: when they are kept and when they are dropped."""

import asyncio
from dataclasses import replace

from app import store
from app.core.thread_pools import ThreadPools
from app.serving.model_describer import ModelDescriber


def test_a_description_is_kept_until_the_files_change():
    async def run() -> None:
        describer = ModelDescriber(ThreadPools())
        files = store.find(None)
        first = await describer.describe(files, key="a")
        assert await describer.describe(files, key="a") is first
        assert await describer.describe(replace(files), key="a") is not first

    asyncio.run(run())


def test_the_description_of_a_removed_model_is_dropped():
    """They were kept forever, so that models that an admin created and deleted took memory."""

    async def run() -> None:
        describer = ModelDescriber(ThreadPools())
        files = store.find(None)
        removed = await describer.describe(files, key="removed")
        kept = await describer.describe(files, key="kept")
        describer.forget_others(["kept"])
        assert await describer.describe(files, key="kept") is kept
        assert await describer.describe(files, key="removed") is not removed

    asyncio.run(run())
