"""Encodes the images of prompts: requests pixels, runs the vision tower, and keeps its output.

Knows: the vision tower, sequences, borrowed memory. Must not know: text models, codecs, chunks of
prompts.

    sequence reaches image → features cached? → acquire them
                           → pixels known?    → encode: one image at a time, a few steps of the
                                                tower per engine step
                           → request pixels of this image and of the next one

Memory is borrowed for pixels before they are requested, so before any file is decoded for them. The
state is derived from the running sequences in each step. So a sequence that is cancelled,
preempted or restarted needs no special handling: pixels that no sequence waits for are dropped.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import Any, cast

import mlx.core as mx

from app.core.images import ImagePixels, ImageSpan, is_row_id
from app.core.units import format_memory
from app.engine.image_cache import ImageFeatureCache, list_arrays
from app.engine.outputs import EngineCounters, OutputProcessor
from app.engine.scheduler import Scheduler
from app.engine.sequence import Sequence
from models.vision.tower import Encoding, ImageFeatures, VisionTower

log = logging.getLogger(__name__)

# The number of images whose pixels are requested together, for all sequences: the one that is
# encoded next, and another, which is decoded while the first is encoded.
_REQUESTED_AHEAD = 2

# A step of the tower that delays the next tokens of running streams by more seconds than a decode
# step and this is followed by decode steps only. These are the majority, so that the median delay
# of a token barely changes, and they take little time compared to a step of the tower.
_UNNOTICED_SECONDS = 0.05
_DECODE_STEPS_BETWEEN = 2

_FAILED = "the engine failed while encoding an image of this request"
_INVALID_FEATURES = (
    "the vision tower produced NaN or infinite numbers for an image of this request: its weights "
    "or its quantization may be corrupt"
)


class _Image:
    """The image that is being encoded. borrowed_bytes: the memory that it borrows until it is
    complete."""

    def __init__(self, key: bytes, encoding: Encoding, borrowed_bytes: int) -> None:
        self.key, self.encoding, self.borrowed_bytes = key, encoding, borrowed_bytes


class ImageEncoder:
    """Encodes the images of one engine.

    step_seconds: the duration up to which an engine step runs more than one step of the tower. None
        for one step, if the clock must not decide.
    clock: returns the time in seconds.
    waiting_for_memory: whether an image waits for memory. Meanwhile, no new sequence may start.
    """

    def __init__(
        self,
        tower: VisionTower,
        features: ImageFeatureCache,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        counters: EngineCounters,
        *,
        step_seconds: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.waiting_for_memory = False
        self._tower = tower
        self._features = features
        self._scheduler = scheduler
        self._outputs = outputs
        self._counters = counters
        self._step_seconds = step_seconds
        self._clock = clock
        self._steps_to_skip = 0
        self._current: _Image | None = None
        self._pixel_bytes: dict[bytes, int] = {}  # borrowed for each image

    @property
    def has_work(self) -> bool:
        """Whether the next step can encode."""
        return self._current is not None or self._next_pixels() is not None

    def is_due(self) -> bool:
        """Whether the next step should encode. Called once per step."""
        if self._steps_to_skip and any(s.decoding for s in self._scheduler.running):
            self._steps_to_skip -= 1
            return False
        return self.has_work

    def prepare(self) -> None:
        """Gives each sequence the features that its next chunk needs, if they are cached, and
        requests pixels for the others. Called before chunks are planned."""
        self.waiting_for_memory = False
        for sequence in self._scheduler.running:
            sequence.release_unneeded_features()
        for sequence in self._waiting_sequences():
            self._acquire(sequence)
        waiting = self._waiting_sequences()
        if self._current is not None and self._current.key not in map(_awaited_key, waiting):
            self._drop_current()
        self._return_pixel_memory()
        self._request_pixels(waiting)

    def encode(self, decode_seconds: float) -> bool:
        """Runs the next steps of the tower, and waits for them. Returns False if there is no image,
        or not enough memory. decode_seconds: the duration of a decode step of all running
        sequences; 0 if unknown."""
        if self._current is None and not self._begin():
            return False
        current = self._current
        assert current is not None
        began = self._clock()
        try:
            self._run_steps(current.encoding, began)
            if current.encoding.num_done == current.encoding.num_steps:
                self._finish(current)
        except Exception:
            log.exception("encoding an image failed")
            self._counters.exceptions += 1
            self._fail(current.key, _FAILED)
            return True
        if (
            self._step_seconds is not None
            and self._clock() - began > decode_seconds + _UNNOTICED_SECONDS
        ):
            self._steps_to_skip = _DECODE_STEPS_BETWEEN
        for sequence in self._scheduler.running:
            if _awaited_key(sequence) == current.key and not sequence.num_output_tokens:
                self._outputs.report_prefill(sequence, sequence.num_computed_tokens)
        return True

    def restart_if_reclaimed(self) -> None:
        """Drops the image that is being encoded, and all pixels, if their memory was reclaimed. The
        pixels are requested again. Must be called between two steps of the tower."""
        borrowed = sum(self._pixel_bytes.values())
        if self._current is not None:
            borrowed += self._current.borrowed_bytes
        if self._scheduler.borrowed_bytes < borrowed:
            log.info("restarting the encoding of an image: out of KV cache memory")
            self._current = None
            self._pixel_bytes.clear()
            for sequence in self._scheduler.running:
                sequence.drop_pixels()

    def _waiting_sequences(self) -> list[Sequence]:
        return [s for s in self._scheduler.running if s.awaits_features]

    def _acquire(self, sequence: Sequence) -> None:
        image = sequence.current_image
        assert image is not None
        sequence.features = self._features.acquire(image.key)
        self._counters.image_cache_hits += sequence.features is not None

    def _list_known_keys(self) -> set[bytes]:
        """Returns the keys of the images whose pixels have arrived or are requested."""
        running = self._scheduler.running
        return {key for s in running for key in (*s.pixels, *s.requested_images)}

    def _return_pixel_memory(self) -> None:
        known = self._list_known_keys()
        for key in self._pixel_bytes.keys() - known:
            self._scheduler.return_borrowed(self._pixel_bytes.pop(key))

    def _request_pixels(self, waiting: Ids[Sequence]) -> None:
        """Requests the pixels of the images that are encoded next. If there are few, also requests
        those of the images after them. So the number of images in memory does not depend on the
        number of sequences. A sequence that computes text may keep the pixels of its next image,
        and no other sequence waits for it."""
        known, awaited = self._list_known_keys(), set(map(_awaited_key, waiting))
        for sequence in waiting:
            image = sequence.current_image if sequence.awaits_features else None
            if image is not None and len(awaited & known) < _REQUESTED_AHEAD:
                self._request(sequence, image, known, self._reserve)
        for sequence in waiting:
            image = self._find_next_image(sequence, known) if sequence.awaits_features else None
            if image is not None and len(known) < _REQUESTED_AHEAD:
                self._request(sequence, image, known, lambda size, _: self._scheduler.borrow(size))

    def _find_next_image(self, sequence: Sequence, known: set[bytes]) -> ImageSpan | None:
        """Returns the first image after the one that the sequence waits for, if it has pixels to
        request."""
        after = (i for i in sequence.job.images if i.start > sequence.num_computed_tokens)
        return next((i for i in after if i.key not in known and i.key not in self._features), None)

    def _request(
        self,
        sequence: Sequence,
        image: ImageSpan,
        known: set[bytes],
        reserve: Callable[[int, Sequence], bool],
    ) -> None:
        """Requests the pixels of an image that are not known, and adds its key to `known`. reserve:
        borrows their memory."""
        key = image.key
        if key in known:
            return
        rows = sum(map(is_row_id, sequence.ids[image.start : image.end]))
        num_bytes = self._tower.estimate_pixel_bytes(rows)
        if reserve(num_bytes, sequence):
            self._pixel_bytes[key] = num_bytes
            known.add(key)
            sequence.requested_images.add(key)
            self._outputs.request_pixels(sequence, (key,))

    def _next_pixels(self) -> tuple[Sequence, ImagePixels] | None:
        """Returns the oldest sequence that waits for features whose pixels are known, and these
        pixels."""
        for sequence in self._waiting_sequences():
            key = _awaited_key(sequence)
            for other in self._scheduler.running:
                if key in other.pixels:
                    return sequence, other.pixels[key]
        return None

    def _begin(self) -> bool:
        """Begins to encode the next image. Returns False if there is none, or not enough memory."""
        chosen = self._next_pixels()
        if chosen is None:
            return False
        sequence, pixels = chosen
        try:
            sizes = [(tile.height, tile.width) for tile in pixels.tiles]
            image = sequence.current_image
            assert image is not None
            rows = sum(map(is_row_id, sequence.ids[image.start : image.end]))
            assert rows == self._tower.count_rows(sizes), "the pixels do not match the prompt"
            needed = self._tower.estimate_bytes(sizes)
            if not self._reserve(needed, sequence):
                return False
            encoding = self._tower.begin([_to_array(tile) for tile in pixels.tiles])
        except Exception:
            log.exception("encoding an image failed")
            self._counters.exceptions += 1
            self._fail(pixels.key, _FAILED)
            return False
        self._current = _Image(pixels.key, encoding, needed)
        return True

    def _reserve(self, num_bytes: int, sequence: Sequence) -> bool:
        """Borrows memory for the image that a sequence waits for, or for its pixels. If all running
        sequences wait for images, preempts the others, youngest first. If that does not suffice,
        fails the sequence."""
        while not self._scheduler.borrow(num_bytes):
            others = [s for s in self._scheduler.running if s is not sequence]
            if not all(s.awaits_features for s in others):
                self.waiting_for_memory = True
                return False
            if not others and self._drop_other_pixels(sequence):
                continue
            if not others:
                message = (
                    f"an image of this request needs {format_memory(num_bytes)} to be encoded, "
                    "which is not available: send a smaller image, or increase --memory"
                )
                self._outputs.fail(sequence, message, invalid_request=True)
                return False
            self._counters.preemptions += 1
            self._scheduler.preempt(others[-1])
            self._return_pixel_memory()
        return True

    def _drop_other_pixels(self, sequence: Sequence) -> bool:
        """Drops the pixels of all images but the one that the only running sequence waits for.
        Returns whether there were any."""
        kept = sequence.pixels.get(_awaited_key(sequence))
        before = len(self._pixel_bytes)
        sequence.drop_pixels()
        if kept is not None:
            sequence.pixels[kept.key] = kept
        self._return_pixel_memory()
        return len(self._pixel_bytes) < before

    def _run_steps(self, encoding: Encoding, began: float) -> None:
        """Runs the next step of the tower, and others while half of the time is left: a step may
        take several times as long as the one before it."""
        while True:
            encoding.run_step()
            if encoding.num_done == encoding.num_steps or self._step_seconds is None:
                return
            if self._clock() - began >= self._step_seconds / 2:
                return

    def _finish(self, current: _Image) -> None:
        """Stores the features, and gives them to all sequences that wait for them."""
        features = current.encoding.finish()
        mx.eval(list_arrays(features))
        if not _is_finite(features):
            self._fail(current.key, _INVALID_FEATURES)
            return
        self._drop_current()
        self._drop_pixels(current.key)
        self._features.store(current.key, features)
        self._counters.images_encoded += 1
        for sequence in self._waiting_sequences():
            if _awaited_key(sequence) == current.key:
                sequence.features = self._features.acquire(current.key)
        self._features.trim()

    def _fail(self, key: bytes, message: str) -> None:
        """Fails the sequences that wait for an image."""
        self._drop_current()
        self._drop_pixels(key)
        for sequence in self._waiting_sequences():
            if _awaited_key(sequence) == key:
                self._outputs.fail(sequence, message)

    def _drop_current(self) -> None:
        if self._current is not None:
            self._scheduler.return_borrowed(self._current.borrowed_bytes)
            self._current = None

    def _drop_pixels(self, key: bytes) -> None:
        for sequence in self._scheduler.running:
            sequence.pixels.pop(key, None)


def _awaited_key(sequence: Sequence) -> bytes:
    """Returns the key of the image that the sequence waits for, or no key."""
    image = sequence.current_image if sequence.awaits_features else None
    return b"" if image is None else image.key


def _is_finite(features: ImageFeatures) -> bool:
    checks: Ids[mx.array] = [mx.all(mx.isfinite(array)) for array in list_arrays(features)]
    return all(cast(bool, check.item()) for check in checks)


def _to_array(tile: Any) -> mx.array:
    # MLX's type stubs lack the buffer protocol.
    pixels: Any = memoryview(tile.data)
    return mx.array(pixels).reshape(tile.height, tile.width, 3)
