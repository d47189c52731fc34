"""How Pillow is used: colors, transparency, rotation, and damaged files. Runs in this process."""

import io

import pytest
from PIL import Image as PillowImage
from PIL import ImageOps

from app.images.decoder_main import DecodeError, convert_to_rgb, decode, make_tiles, set_up_pillow
from app.images.plan import Resize, Tile
from tests.images.samples import Pixels, encode, make_exif, make_gradient


def show(data: bytes) -> Pixels:
    """Returns the decoded image without resizing it."""
    size = PillowImage.open(io.BytesIO(data)).size
    exif = PillowImage.open(io.BytesIO(data)).getexif().get(274, 1)
    width, height = size if exif < 5 else size[::-1]
    [tile] = decode(data, [Tile(resizes=(Resize(width=width, height=height, filter="bicubic"),))])
    return tile


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_image_is_rotated_as_its_metadata_requests(image_format: str, orientation: int):
    data = encode(make_gradient(41, 23), image_format, exif=make_exif(orientation))
    expected = ImageOps.exif_transpose(PillowImage.open(io.BytesIO(data))).convert("RGB")
    assert show(data).tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparent_pixels_are_white(mode: str):
    image = PillowImage.new("RGBA", (8, 8), (255, 0, 0, 0))
    if mode == "P":
        data = encode(PillowImage.new("P", (8, 8), 0), transparency=0)
        assert show(data).getpixel((0, 0)) == (255, 255, 255)
        return
    assert convert_to_rgb(image.convert(mode)).getpixel((0, 0)) == (255, 255, 255)


def test_half_transparent_pixels_are_mixed_with_white():
    color = show(encode(PillowImage.new("RGBA", (8, 8), (0, 0, 0, 128)))).getpixel((0, 0))
    assert color == (127, 127, 127)


def test_a_large_transparent_image_is_composited_in_bands_without_a_difference():
    image = make_gradient(1500, 1500).convert("RGBA")
    image.putalpha(PillowImage.linear_gradient("L").resize(image.size))
    white = PillowImage.new("RGBA", image.size, "white")
    expected = PillowImage.alpha_composite(white, image).convert("RGB")
    assert convert_to_rgb(image).tobytes() == expected.tobytes()


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(image_format: str):
    frames = [PillowImage.new("RGB", (32, 32), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if image_format == "WEBP" else {}
    data = encode(frames[0], image_format, save_all=True, append_images=frames[1:], **options)
    assert show(data).getpixel((5, 5)) == (255, 0, 0)


def test_greys_of_16_bits_are_scaled():
    for value, expected in ((0, 0), (40000, 156), (65535, 255), (257, 1), (255, 1), (128, 0)):
        grey = show(encode(PillowImage.new("I;16", (8, 8), value))).getpixel((0, 0))
        assert grey == (expected,) * 3, value


def test_cmyk_is_converted():
    data = encode(PillowImage.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG")
    red, green, blue = show(data).tobytes()[:3]
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_other_modes_are_those_of_pillow(mode: str):
    image = make_gradient(40, 24).convert(mode)
    assert show(encode(image)).tobytes() == image.convert("RGB").tobytes()


def test_the_first_picture_of_a_multi_picture_file_is_shown():
    data = encode(
        PillowImage.new("RGB", (16, 16), "red"),
        "MPO",
        append_images=[PillowImage.new("RGB", (16, 16), "blue")],
        save_all=True,
    )
    assert show(data).tobytes()[0] > 240


def test_tiles_are_resized_in_steps_and_cropped():
    image = make_gradient(100, 60)
    first = Resize(width=64, height=64, filter="lanczos")
    second = Resize(width=16, height=16, filter="bilinear")
    tiles = [
        Tile(resizes=(first,), crop=(0, 0, 32, 32)),
        Tile(resizes=(first,), crop=(32, 0, 64, 32)),
        Tile(resizes=(first, second)),
    ]
    large = image.resize((64, 64), PillowImage.Resampling.LANCZOS)
    expected = [
        large.crop((0, 0, 32, 32)),
        large.crop((32, 0, 64, 32)),
        large.resize((16, 16), PillowImage.Resampling.BILINEAR),
    ]
    made = make_tiles(image, tiles)
    assert [tile.tobytes() for tile in made] == [tile.tobytes() for tile in expected]
    assert [(tile.width, tile.height) for tile in made] == [
        (tile.width, tile.height) for tile in tiles
    ]


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_damaged_file_is_an_error_without_the_words_of_pillow(image_format: str):
    set_up_pillow()
    data = encode(make_gradient(400, 240), image_format)
    broken = data[: len(data) // 2]
    with pytest.raises(
        DecodeError, match=r"truncated: send the complete|damaged and cannot"
    ) as caught:
        show_unchecked(broken)
    assert "object at" not in str(caught.value)


def show_unchecked(data: bytes) -> None:
    decode(data, [Tile(resizes=(Resize(width=8, height=8, filter="bicubic"),))])
