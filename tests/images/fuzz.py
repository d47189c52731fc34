"""Mutated images through the header parser and the process that decodes them.

    python -m tests.images.fuzz [COUNT [SEED]]

Prints how many files were rejected by their header, decoded, or reported as damaged. An exception
of any other type is a failure. A crash or a limit of the process is counted: only the image fails,
as in a server.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator

from PIL import Image as PillowImage

from app.core.errors import AppError
from app.images.decoder import ImageDecoder
from app.images.decoder_protocol import DecodeLimits
from app.images.plan import ImagePlan, Resize, Tile
from tests.images.samples import encode, make_exif, make_gradient, read

PLAN = ImagePlan(
    tiles=(Tile(resizes=(Resize(width=16, height=16, filter="bicubic"),)),),
    grid=(1, 1),
    text="x",
    token="x",
    num_tokens=1,
    version="fuzz",
)

# values at which sizes and lengths overflow or end
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def make_seeds() -> list[bytes]:
    """Returns small files of all formats and of their usual variants."""
    image = make_gradient(40, 24)
    frames = [make_gradient(24, 24).rotate(90 * turn) for turn in range(3)]
    alpha = image.convert("RGBA")
    alpha.putalpha(PillowImage.linear_gradient("L").resize(image.size))
    palette = image.convert("P")
    grey16 = PillowImage.new("I;16", (20, 20), 40000)
    animation = {"save_all": True, "append_images": frames[1:]}
    return [
        encode(image),
        encode(alpha),
        encode(palette, transparency=3),
        encode(grey16),
        encode(image.convert("1")),
        encode(image, exif=make_exif(6)),
        encode(frames[0], **animation),
        encode(image, "JPEG"),
        encode(image, "JPEG", progressive=True),
        encode(image, "JPEG", exif=make_exif(8), restart_marker_rows=1),
        encode(image.convert("CMYK"), "JPEG"),
        encode(image.convert("L"), "JPEG"),
        encode(image, "MPO", append_images=[image]),
        encode(image, "WEBP"),
        encode(image, "WEBP", lossless=True),
        encode(alpha, "WEBP", exif=make_exif(3)),
        encode(frames[0], "WEBP", **animation),
        encode(palette, "GIF", transparency=3),
        encode(frames[0], "GIF", comment=b"a comment", **animation),
    ]


def mutate(data: bytes, choose: random.Random) -> bytes:
    """Returns a copy with one to eight changes: bytes, numbers, and moved, repeated or missing
    parts. Headers are changed more often than the rest."""
    changed = bytearray(data)
    for _ in range(choose.randint(1, 8)):
        end = len(changed) if choose.random() < 0.5 else min(len(changed), 64)
        at = choose.randrange(max(1, end))
        kind = choose.randrange(7)
        if kind == 0 and changed:
            changed[at % len(changed)] = choose.randrange(256)
        elif kind == 1 and changed:
            changed[at % len(changed)] ^= 1 << choose.randrange(8)
        elif kind == 2:
            size = choose.choice((1, 2, 4))
            number = choose.choice(_NUMBERS) & (1 << 8 * size) - 1
            order = choose.choice(("little", "big"))
            changed[at : at + size] = number.to_bytes(size, order)
        elif kind == 3:
            del changed[at : at + choose.randint(1, 16)]
        elif kind == 4:
            changed[at:at] = changed[at : at + choose.randint(1, 64)]
        elif kind == 5:
            changed[at:at] = choose.randbytes(choose.randint(1, 16))
        else:
            del changed[choose.randrange(max(1, len(changed))) :]
    return bytes(changed)


def iter_mutations(count: int, seed: int) -> Iterator[bytes]:
    choose, seeds = random.Random(seed), make_seeds()
    for _ in range(count):
        yield mutate(choose.choice(seeds), choose)


async def run(count: int, seed: int) -> Counter[str]:
    """Returns the number of files by result."""
    decoder = ImageDecoder(DecodeLimits(images=20_000), cache_bytes=0)
    results: Counter[str] = Counter()
    slowest = 0.0
    try:
        for data in iter_mutations(count, seed):
            start = time.perf_counter()
            try:
                image = read(data)
            except AppError:
                results["rejected by the header"] += 1
                assert time.perf_counter() - start < 1
                continue
            try:
                await decoder.decode(image, PLAN)
                results["decoded"] += 1
            except AppError as error:
                results[_classify(error)] += 1
            slowest = max(slowest, time.perf_counter() - start)
    finally:
        await decoder.close()
    results["milliseconds of the slowest"] = int(slowest * 1000)
    return results


def _classify(error: AppError) -> str:
    for sign in ("truncated", "damaged", "inconsistent", "takes more than", "needs more than"):
        if sign in error.message:
            return sign
    return error.message


if __name__ == "__main__":
    options = [int(one) for one in sys.argv[1:]]
    count, seed = (*options, *(1000, 0)[len(options) :])
    for result, number in asyncio.run(run(count, seed)).most_common():
        print(f"{number:8} {result}")
