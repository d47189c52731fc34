"""The process that decodes images: limits, crashes, order, cancellation, and what it may do."""

import asyncio
import os
import signal
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.errors import AppError, ErrorKind
from app.core.images import ImagePixels
from app.images import decoder as decoder_module
from app.images.decoder import ImageDecoder
from app.images.decoder_protocol import DecodeLimits
from app.images.plan import ImagePlan, Resize, Tile
from tests.images import fuzz
from tests.images.samples import encode, make_exif, make_gradient, read
from tests.images.test_headers import make_png
from tests.waiting import wait_until_async

PNG = encode(make_gradient(64, 48))


@asynccontextmanager
async def run_decoder(limits: DecodeLimits | None = None) -> AsyncIterator[ImageDecoder]:
    decoder = ImageDecoder(limits)
    try:
        yield decoder
    finally:
        await decoder.close()


def make_plan(width: int, height: int) -> ImagePlan:
    resize = Resize(width=width, height=height, filter="bicubic")
    return ImagePlan(
        tiles=(Tile(resizes=(resize,)),),
        grid=(1, 1),
        text="x",
        token="x",
        num_tokens=1,
        version="test",
    )


SMALL = make_plan(32, 24)

# takes several seconds
SLOW = replace(
    SMALL,
    tiles=(
        Tile(
            resizes=tuple(
                Resize(width=1500 - n % 2, height=1500, filter="lanczos") for n in range(100)
            )
        ),
    ),
)


def get_pid(decoder: ImageDecoder) -> int:
    child = decoder._child
    assert child is not None
    return child.process.pid


def make_large_png() -> bytes:
    """Returns a small file with 64 million black pixels, the maximum."""
    return make_png(8000, 8000, data=zlib.compress(bytes(8000 * (1 + 8000 // 8)), 9))


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "MPO"])
def test_an_image_is_decoded_and_resized(image_format: str):
    async def run() -> None:
        async with run_decoder() as decoder:
            image = read(encode(make_gradient(64, 48), image_format))
            pixels = await decoder.decode(image, SMALL)
            assert pixels.key == SMALL.key(image)
            [tile] = pixels.tiles
            assert (tile.height, tile.width, len(tile.data)) == (24, 32, 24 * 32 * 3)

    asyncio.run(run())


def test_a_broken_image_is_the_same_error_each_time_with_the_path_of_each_request():
    async def run() -> None:
        async with run_decoder() as decoder:
            for param in ("messages.0.content.0", "input.3"):
                with pytest.raises(AppError) as caught:
                    await decoder.decode(read(PNG[:200], param), SMALL)
                assert caught.value.message == (
                    f"{param}: the PNG image is truncated: send the complete file"
                )
                assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, param)
            assert get_count(decoder) == 1

    asyncio.run(run())


def get_count(decoder: ImageDecoder) -> int:
    """Returns how many images the process was given."""
    child = decoder._child
    return 0 if child is None else child.num_images


def test_an_image_is_verified_only_once():
    async def run() -> None:
        async with run_decoder() as decoder:
            for _ in range(3):
                await decoder.verify(read(PNG), SMALL)
            assert get_count(decoder) == 1
            for width in (32, 16, 8):
                with pytest.raises(AppError, match="truncated"):
                    await decoder.verify(read(PNG[:200]), make_plan(width, 8))
            assert get_count(decoder) == 2

    asyncio.run(run())


def test_an_image_that_failed_in_one_geometry_is_decoded_in_another():
    """Two models may share a server: the tiles of one of them took too much time."""

    async def run() -> None:
        async with run_decoder(DecodeLimits(cpu=0)) as decoder:
            for _ in range(2):
                with pytest.raises(AppError, match="takes more than 0 s of CPU time"):
                    await decoder.verify(read(PNG), SLOW)
            await decoder.verify(read(PNG), SMALL)
            await decoder.decode(read(PNG), SMALL)
            assert get_count(decoder) == 1

    asyncio.run(run())


def test_recent_pixels_are_kept():
    async def run() -> None:
        async with run_decoder() as decoder:
            first = await decoder.decode(read(PNG), SMALL)
            assert await decoder.decode(read(PNG), SMALL) is first
            assert get_count(decoder) == 1

    asyncio.run(run())


def test_concurrent_callers_with_the_same_image_decode_it_once():
    async def run() -> None:
        async with run_decoder() as decoder:
            pixels = await asyncio.gather(
                *(decoder.decode(read(PNG), SMALL, caller=str(n)) for n in range(8))
            )
            assert len({id(one) for one in pixels}) == 1
            assert get_count(decoder) == 1

    asyncio.run(run())


def test_callers_take_turns():
    async def run() -> None:
        order: list[str] = []

        async def decode(caller: str, side: int) -> None:
            await decoder.decode(read(PNG), make_plan(side, 8), caller=caller)
            order.append(caller)

        async with run_decoder() as decoder:
            works = [decode("many", side) for side in range(8, 14)] + [decode("one", 20)]
            await asyncio.gather(*works)
        assert order.index("one") <= 2

    asyncio.run(run())


def test_a_cancelled_caller_does_not_affect_the_others():
    async def run() -> None:
        async with run_decoder() as decoder:
            tasks = [
                asyncio.create_task(decoder.decode(read(PNG), make_plan(side, 8)))
                for side in range(8, 16)
            ]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in found[::2])
            pixels = [one for one in found if isinstance(one, ImagePixels)]
            assert [one.tiles[0].width for one in pixels] == [9, 11, 13, 15]

    asyncio.run(run())


def test_the_process_ends_if_no_caller_waits_for_a_slow_image(monkeypatch: pytest.MonkeyPatch):
    """The clients have disconnected. Other callers do not wait for the rest of its work."""
    monkeypatch.setattr(decoder_module, "_ABANDONED_AFTER", 0.0)

    async def run() -> None:
        async with run_decoder() as decoder:
            await decoder.decode(read(PNG), SMALL)
            pid = get_pid(decoder)
            slow = asyncio.create_task(decoder.decode(read(PNG), SLOW))
            await wait_until_async(lambda: get_count(decoder) == 2)
            slow.cancel()
            await decoder.decode(read(PNG), make_plan(8, 8))
            assert (get_pid(decoder) != pid, get_count(decoder)) == (True, 1)

    asyncio.run(run())


def test_a_process_that_another_process_kills_is_replaced():
    async def run() -> None:
        async with run_decoder() as decoder:
            await decoder.decode(read(PNG), SMALL)
            killed = get_pid(decoder)
            os.kill(killed, signal.SIGKILL)
            await decoder.decode(read(PNG), make_plan(8, 8))
            assert get_pid(decoder) != killed

    asyncio.run(run())


def test_a_stopped_process_is_killed_after_the_time_limit():
    async def run() -> None:
        async with run_decoder(DecodeLimits(wall=3)) as decoder:
            await decoder.decode(read(PNG), SMALL)
            stopped = get_pid(decoder)
            os.kill(stopped, signal.SIGSTOP)
            with pytest.raises(AppError, match="took longer than 3 s: try again") as caught:
                await decoder.decode(read(PNG), make_plan(8, 8))
            assert caught.value.kind is ErrorKind.OVERLOADED
            with pytest.raises(ProcessLookupError):
                os.kill(stopped, 0)

    asyncio.run(run())


def test_an_image_that_takes_too_much_cpu_time_is_an_error():
    async def run() -> None:
        async with run_decoder(DecodeLimits(cpu=0)) as decoder:
            with pytest.raises(AppError, match="takes more than 0 s of CPU time"):
                await decoder.decode(read(PNG), SLOW)
            await decoder.decode(read(encode(make_gradient(9, 9))), SMALL)

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce the limit")
def test_an_image_that_needs_too_much_memory_is_an_error():
    async def run() -> None:
        async with run_decoder(DecodeLimits(memory=200 << 20)) as decoder:
            with pytest.raises(AppError, match="needs more than 200 MiB of memory"):
                await decoder.decode(read(make_large_png()), SMALL)
            await decoder.decode(read(PNG), SMALL)

    asyncio.run(run())


def test_an_image_of_the_maximum_size_is_decoded():
    async def run() -> None:
        async with run_decoder() as decoder:
            [tile] = (await decoder.decode(read(make_large_png()), SMALL)).tiles
            assert set(tile.data) == {0}

    asyncio.run(run())


def test_the_process_is_replaced_after_a_number_of_images():
    async def run() -> None:
        async with run_decoder(DecodeLimits(images=2)) as decoder:
            for side in range(8, 13):
                await decoder.decode(read(PNG), make_plan(side, 8))
            assert get_count(decoder) == 1

    asyncio.run(run())


def test_the_process_has_no_secrets_and_can_open_no_files(monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        monkeypatch.setenv("MLXRUNNER_API_KEY", "secret")
        async with run_decoder() as decoder:
            await decoder.decode(read(PNG), SMALL)
            proc = Path(f"/proc/{get_pid(decoder)}")
            assert b"secret" not in (proc / "environ").read_bytes()
            assert len(list((proc / "fd").iterdir())) <= 4
            limits = (proc / "limits").read_text()
            assert "Max open files            4 " in limits
            assert "Max file size             0 " in limits

    if sys.platform != "linux":
        pytest.skip("reads /proc")
    asyncio.run(run())


def test_closing_fails_waiting_callers_and_ends_the_process():
    async def run() -> None:
        decoder = ImageDecoder()
        await decoder.decode(read(PNG), SMALL)
        pid = get_pid(decoder)
        tasks = [
            asyncio.create_task(decoder.decode(read(PNG), make_plan(side, 8)))
            for side in range(8, 12)
        ]
        await asyncio.sleep(0)
        await decoder.close()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, AppError) and one.kind is ErrorKind.STOPPING for one in found)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(AppError, match="shutting down"):
            await decoder.decode(read(PNG), SMALL)

    asyncio.run(run())


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder_module, "_MODULE", "app.images.missing")

    async def run() -> None:
        async with run_decoder() as decoder:
            with pytest.raises(AppError, match="cannot be started: exit status 1") as caught:
                await decoder.decode(read(PNG), SMALL)
            assert caught.value.kind is ErrorKind.ENGINE

    asyncio.run(run())


def test_a_file_whose_header_contradicts_its_content_is_an_error():
    async def run() -> None:
        data = encode(make_gradient(64, 48), "WEBP", exif=make_exif(1))
        assert data[12:16] == b"VP8X"
        other = data[:24] + bytes([99]) + data[25:]
        async with run_decoder() as decoder:
            image = read(other)
            assert image.width == 100
            with pytest.raises(AppError, match=r"inconsistent|damaged"):
                await decoder.decode(image, SMALL)

    asyncio.run(run())


def test_mutated_files_never_cost_more_than_themselves():
    results = asyncio.run(fuzz.run(300, seed=7))
    allowed = {
        "rejected by the header",
        "decoded",
        "damaged",
        "truncated",
        "inconsistent",
        "large",
    }
    assert set(results) - {"milliseconds of the slowest"} <= allowed


@pytest.mark.exhaustive
def test_many_mutated_files_never_cost_more_than_themselves():
    results = asyncio.run(fuzz.run(20_000, seed=8))
    assert results["decoded"] > 1000
    assert not [one for one in results if "crashes the decoder" in one]
