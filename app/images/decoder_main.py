"""`python -m app.images.decoder_main`: the process that decodes and resizes images with Pillow.

Knows: Pillow, resource limits, its input and output. Must not know: requests, models, files.

The encoded images come from clients and may attack the codecs. So this process has no descriptors
but its pipes, cannot open any, and has none of the server's environment variables. It handles one
image at a time, and exits if its parent exits. It keeps no metadata of an image, and prints none.
"""

import os
import resource
import sys
import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import (  # all that a decoder would import later, when no file can be opened
    GifImagePlugin,
    Image,
    ImageFile,
    ImagePalette,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from app.core.images import ImageFormat
from app.images.decoder_protocol import (
    OUT_OF_MEMORY_STATUS,
    encode_message,
    read_message,
    unpack_tiles,
)
from app.images.headers import MAX_PIXELS, SUPPORTED, Header, describe_format, read_header
from app.images.plan import Filter, Resize, Tile
from app.runners import parent_watch

PLUGINS = (
    GifImagePlugin,
    ImagePalette,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

_PILLOW_FORMATS: dict[ImageFormat, str] = {
    "png": "PNG",
    "jpeg": "JPEG",
    "webp": "WEBP",
    "gif": "GIF",
}
_FILTERS: dict[Filter, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# EXIF orientation → the operation that shows the image upright
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# The number of pixels that are composited at a time, which takes 12 bytes per pixel.
_BAND_PIXELS = 1 << 20

# the descriptors of a process: stdin, stdout, stderr, and the copy of stdout
_MAX_DESCRIPTORS = 4


class DecodeError(Exception):
    """A file that cannot be decoded, whatever the tiles. The message is a clause with a remedy, as
    in `HeaderError`."""


def main() -> int:
    parent_watch.tie_to_parent()
    output = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # nothing may be printed into a message or into a log
        os.dup2(null, descriptor)
    os.close(null)
    hello = read_message(lambda size: os.read(0, size))
    if hello is None:
        return 1
    limits, _ = hello
    set_up_pillow()
    apply_limits(limits["memory"])
    _write(output, encode_message({}))
    while (request := read_message(lambda size: os.read(0, size))) is not None:
        header, data = request
        limit_cpu_time(limits["cpu"])
        try:
            response = _handle(header, data)
        except MemoryError:
            return OUT_OF_MEMORY_STATUS
        _write(output, response)
        del request, data, response
    return 0


def set_up_pillow() -> None:
    """Sets Pillow's limits, and imports the modules that `Image.open` would import. Other warnings,
    for example about metadata, have no effect."""
    Image.preinit()
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)


def apply_limits(memory: int) -> None:
    """Limits the address space of this process to `memory` bytes, and forbids files, sockets and
    child processes. macOS does not enforce the first limit; there, the limits of the header bound
    the memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_DESCRIPTORS, _MAX_DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def limit_cpu_time(seconds: int) -> None:
    """Ends this process with SIGXCPU after this number of CPU seconds from now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + 1 + seconds, hard))


def _handle(header: dict[str, Any], data: bytes) -> bytes:
    try:
        tiles = decode(data, unpack_tiles(header["tiles"]))
    except DecodeError as error:
        return encode_message({"error": str(error)})
    sizes = [(tile.height, tile.width) for tile in tiles]
    return encode_message({"sizes": sizes}, b"".join(tile.tobytes() for tile in tiles))


def decode(data: bytes, tiles: Sequence[Tile]) -> list[Image.Image]:
    """Returns the RGB pixels of the tiles. data: an encoded image, whose header was accepted
    before. Raises DecodeError, and MemoryError."""
    header = read_header(data)
    try:
        image = _load(data, header)
    except (DecodeError, MemoryError):
        raise
    # Pillow's plugins raise many types for damaged files, whose messages may contain addresses.
    except Exception as error:
        raise DecodeError(_explain(error, header.format)) from error
    return make_tiles(image, tiles)


def _explain(error: Exception, image_format: ImageFormat) -> str:
    name = describe_format(image_format)
    if isinstance(error, OSError) and "truncated" in str(error):
        return f"the {name} image is truncated: send the complete file"
    return f"the {name} image is damaged and cannot be decoded: send it as {SUPPORTED}"


def _load(data: bytes, header: Header) -> Image.Image:
    """Returns the first frame, upright, in RGB, on white."""
    image = Image.open(BytesIO(data), formats=(_PILLOW_FORMATS[header.format],))
    upright = header.width, header.height
    expected = upright[::-1] if header.orientation >= 5 else upright
    if image.size != expected:
        raise DecodeError(
            f"the {describe_format(header.format)} image has inconsistent sizes in its header: "
            f"send it as {SUPPORTED}"
        )
    image.load()
    if image.size != expected:
        raise DecodeError(_explain(ValueError(), header.format))
    image = convert_to_rgb(image)
    transposition = _TRANSPOSITIONS.get(header.orientation)
    return image if transposition is None else image.transpose(transposition)


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """Returns an image in RGB. Transparent pixels become white, and 16-bit gray values are scaled:
    Pillow's own conversion shows the hidden color of transparent pixels, and white for all gray
    values above 255. The color profile is ignored."""
    if image.mode.startswith("I"):
        return image.point(lambda grey: grey * (1 / 257) + 0.5).convert("L").convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    result = Image.new("RGB", image.size)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        band = image.crop((0, top, image.width, bottom)).convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        result.paste(Image.alpha_composite(white, band).convert("RGB"), (0, top))
    return result


def make_tiles(image: Image.Image, tiles: Sequence[Tile]) -> list[Image.Image]:
    """Resizes and crops an image. Each sequence of resizes is computed once."""
    resized: dict[tuple[Resize, ...], Image.Image] = {(): image}
    made: list[Image.Image] = []
    for tile in tiles:
        for count in range(1, len(tile.resizes) + 1):
            steps = tile.resizes[:count]
            if steps not in resized:
                last = steps[-1]
                source = resized[steps[:-1]]
                resized[steps] = source.resize((last.width, last.height), _FILTERS[last.filter])
        whole = resized[tile.resizes]
        made.append(whole if tile.crop is None else whole.crop(tile.crop))
    return made


def _write(descriptor: int, message: bytes) -> None:
    view = memoryview(message)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    sys.exit(main())
