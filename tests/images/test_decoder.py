"""The process that decodes images."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.images.decoder import ImageDecoder
from app.images.decoder_protocol import DecodeLimits
from app.images.plan import ImagePlan, Resize, Tile
from tests.images.samples import encode, make_gradient, read


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


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_image_is_decoded_and_resized(image_format: str):
    async def run() -> None:
        async with run_decoder() as decoder:
            image = read(encode(make_gradient(64, 48), image_format))
            pixels = await decoder.decode(image, make_plan(32, 24))
            assert pixels.key == make_plan(32, 24).key(image)
            [tile] = pixels.tiles
            assert (tile.height, tile.width, len(tile.data)) == (24, 32, 24 * 32 * 3)

    asyncio.run(run())
