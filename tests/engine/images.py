"""Prompts with images, and a vision tower whose rows are derived from the pixels."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from app.core.images import ImagePixels, ImageSpan, Pixels, make_row_id
from app.core.jobs import EngineStats, Job, PixelsNeeded, StepOutput
from app.engine.loop import Loop
from models.vision.tower import ImageFeatures
from tests.engine.harness import Outcome, job, record

# the marks around an image, as ordinary tokens
BEGIN, END = 1, 2

# the side in pixels of the square that becomes an image row
SIDE = 2


class FakeTower:
    """Computes an image in `steps` steps. begun: the number of images that were begun. fault: what
    the second step raises. invalid: whether the rows contain NaN."""

    def __init__(self, hidden: int, *, steps: int = 3, deepstack: int = 0) -> None:
        self.hidden, self.steps, self.deepstack = hidden, steps, deepstack
        self.begun = 0
        self.fault: Exception | None = None
        self.invalid = False

    def count_rows(self, sizes: Sequence[tuple[int, int]]) -> int:
        return sum((height // SIDE) * (width // SIDE) for height, width in sizes)

    def estimate_pixel_bytes(self, rows: int) -> int:
        return 3 * rows * SIDE**2

    def estimate_bytes(self, sizes: Sequence[tuple[int, int]]) -> int:
        return 8 * self.count_rows(sizes) * self.hidden * (1 + self.deepstack)

    def begin(self, tiles: Sequence[mx.array]) -> "FakeEncoding":
        self.begun += 1
        return FakeEncoding(self, tiles)


class FakeEncoding:
    def __init__(self, tower: FakeTower, tiles: Sequence[mx.array]) -> None:
        self._tower = tower
        self._tiles = tiles
        self.num_steps, self.num_done = tower.steps, 0

    def run_step(self) -> None:
        self.num_done += 1
        assert self.num_done <= self.num_steps
        if self.num_done == 2 and self._tower.fault is not None:
            raise self._tower.fault

    def finish(self) -> ImageFeatures:
        assert self.num_done == self.num_steps
        tower = self._tower
        content = b"".join(np.array(tile).tobytes() for tile in self._tiles)
        rows = tower.count_rows([(tile.shape[0], tile.shape[1]) for tile in self._tiles])
        rng = np.random.default_rng(list(hashlib.sha256(content).digest()))
        levels = rng.standard_normal((1 + tower.deepstack, rows, tower.hidden)).astype(np.float32)
        if tower.invalid:
            levels[0, 0, 0] = np.nan
        first, *deepstack = map(mx.array, levels)
        return ImageFeatures(rows=first, deepstack=tuple(deepstack))


def picture(seed: int = 0, rows: int = 2, columns: int = 3, *, side: int = SIDE) -> ImagePixels:
    height, width = rows * side, columns * side
    data = np.random.default_rng(seed).bytes(height * width * 3)
    key = hashlib.sha256(data + bytes([rows, columns])).digest()
    return ImagePixels(key=key, tiles=(Pixels(height=height, width=width, data=data),))


Part = bytes | ImagePixels


def build_prompt(*parts: Part, side: int = SIDE) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Returns the token IDs of texts and images, and the spans of the images."""
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, bytes):
            ids += part
            continue
        [tile] = part.tiles
        grid = (tile.height // side, tile.width // side)
        length = grid[0] * grid[1]
        ids.append(BEGIN)
        spans.append(ImageSpan(key=part.key, start=len(ids), length=length, grid=grid))
        ids += [make_row_id(part.key, row) for row in range(length)]
        ids.append(END)
    return ids, tuple(spans)


def image_job(name: str, *parts: Part, side: int = SIDE, **changes: Any) -> Job:
    ids, spans = build_prompt(*parts, side=side)
    return job(name, ids, images=spans, **changes)


@dataclass
class Driver:
    """Runs jobs, and provides the pixels that they request. provides: whether to do so; it is
    called with the ID of the job. requests: (ID of the job, key)."""

    loop: Loop
    pictures: Mapping[bytes, ImagePixels]
    provides: Callable[[str], bool] = lambda _: True
    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    requests: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    stats: EngineStats = field(default_factory=EngineStats)

    def submit(self, *jobs: Job) -> None:
        for one in jobs:
            self.outcomes[one.id] = Outcome()
            self.loop.submit(one)

    def step(self) -> StepOutput:
        output = self.loop.step()
        self.stats = output.stats
        for update in output.updates:
            record(self.outcomes[update.job_id], update)
        needed = [update for update in output.updates if isinstance(update, PixelsNeeded)]
        for update in needed:
            self.requests += [(update.job_id, key) for key in update.keys]
            if self.provides(update.job_id):
                self.provide(update.job_id, update.keys)
        self.loop.check()
        assert output.stats.ledger.free >= 0, "the ledger is overdrawn"
        return output

    def provide(self, name: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.loop.provide_images(name, [self.pictures[key]])

    def run(self, *jobs: Job) -> dict[str, Outcome]:
        self.submit(*jobs)
        steps = 0
        while not self.loop.idle:
            self.step()
            steps += 1
            assert steps < 5000
        return self.outcomes


def drive(loop: Loop, *pictures: ImagePixels, **options: Any) -> Driver:
    return Driver(loop, {image.key: image for image in pictures}, **options)
