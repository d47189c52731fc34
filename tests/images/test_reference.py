"""The pixels and the prompt text of each family match transformers bit by bit."""

import json
from pathlib import Path

import pytest

from tests.images import reference
from tests.images.reference import FAMILIES, PHOTOS

DIGESTS = json.loads(reference.FILE.read_text())

# large images, which take longer, are compared manually (see the script)
LIVE_VARIANTS = ("as it is", "37x23", "398x2")


def test_the_digests_cover_all_families_and_shapes():
    cases = {
        f"{path.name} {variant}" for path in PHOTOS.glob("*.[pj]*") for variant in make_all(path)
    }
    assert len(cases) == 24
    assert {family: set(found) for family, found in DIGESTS.items()} == dict.fromkeys(
        FAMILIES, cases
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("photo", ["astronaut.png", "rocket.jpg"])
def test_the_pixels_and_the_text_are_those_of_transformers(family: str, photo: str):
    for variant, image in make_all(PHOTOS / photo).items():
        tiles, text, _ = reference.compute_ours(FAMILIES[family], image)
        expected = DIGESTS[family][f"{photo} {variant}"]
        assert reference.make_digest(tiles, text) == expected, variant


@pytest.mark.parametrize("family", FAMILIES)
def test_the_digests_are_those_of_the_installed_transformers(family: str):
    pytest.importorskip("transformers")
    if family in ("mistral3", "pixtral"):
        pytest.importorskip("torch", reason="transformers' PixtralProcessor requires it")
    images = make_all(PHOTOS / "astronaut.png")
    for variant in LIVE_VARIANTS:
        found = reference.compute_reference(FAMILIES[family], images[variant])
        expected = DIGESTS[family][f"astronaut.png {variant}"]
        assert reference.make_digest(*found) == expected, variant


def make_all(path: Path) -> "dict[str, reference.PillowImage.Image]":
    return dict(reference.make_variants(reference.PillowImage.open(path)))
