"""Draws the images of the colors model: one colored shape on white."""

import io

from PIL import Image, ImageDraw

COLORS = {
    "red": (220, 30, 30),
    "green": (20, 160, 40),
    "blue": (30, 60, 220),
    "yellow": (240, 210, 20),
    "black": (0, 0, 0),
    "purple": (140, 30, 160),
}
SHAPES = ("square", "circle", "triangle")
SIDE = 256  # pixels; the smallest image of the model's processor


def draw(color: tuple[int, int, int], shape: str, box: tuple[int, int, int]) -> Image.Image:
    """box: the left and the upper edge, and the size in pixels."""
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    x, y, size = box
    if shape == "square":
        pen.rectangle((x, y, x + size, y + size), fill=color)
    elif shape == "circle":
        pen.ellipse((x, y, x + size, y + size), fill=color)
    else:
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=color)
    return image


def encode_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def draw_named(color: str, index: int = 0) -> Image.Image:
    """Returns the image number `index` of this color."""
    box = (20 + 11 * index % 70, 30 + 17 * index % 60, 100 + 7 * index % 50)
    return draw(COLORS[color], SHAPES[index % len(SHAPES)], box)
