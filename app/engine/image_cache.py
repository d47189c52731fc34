"""The features of images, kept for later prompts with the same images.

Knows: features by the key of the image, their bytes. Must not know: vision towers, sequences.

A sequence acquires the features of an image while it computes the image's rows. These bytes count
as part of the running sequences. Features without a user are evicted, least recently used first.
"""

from collections import OrderedDict
from dataclasses import dataclass

import mlx.core as mx

from models.vision.tower import ImageFeatures


@dataclass(slots=True, eq=False)
class _Entry:
    features: ImageFeatures
    nbytes: int
    users: int = 0


class FeatureLease:
    """The use of an image's features by one sequence. It ends with `release`."""

    def __init__(self, cache: "ImageFeatureCache", key: bytes, features: ImageFeatures) -> None:
        self._cache = cache
        self.key = key
        self.features = features

    def release(self) -> None:
        self._cache.release(self.key)


class ImageFeatureCache:
    """The features of one engine. max_bytes: the maximum size of features without a user."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first

    @property
    def nbytes(self) -> int:
        """The size in bytes of features without a user."""
        return sum(entry.nbytes for entry in self._entries.values() if not entry.users)

    @property
    def used_bytes(self) -> int:
        """The size in bytes of features with a user."""
        return sum(entry.nbytes for entry in self._entries.values() if entry.users)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def store(self, key: bytes, features: ImageFeatures) -> None:
        """Adds evaluated features without a user. The caller acquires them and calls `trim`."""
        assert key not in self._entries, "an image is encoded once"
        nbytes = sum(array.nbytes for array in list_arrays(features))
        self._entries[key] = _Entry(features, nbytes)

    def acquire(self, key: bytes) -> FeatureLease | None:
        """Returns the features, which are kept until the lease is released. Returns None if they
        are not cached."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.users += 1
        self._entries.move_to_end(key)
        return FeatureLease(self, key, entry.features)

    def release(self, key: bytes) -> None:
        """Ends one use. Called by the lease."""
        entry = self._entries[key]
        assert entry.users > 0, "the features have no user"
        entry.users -= 1
        self.trim()

    def trim(self) -> None:
        """Evicts features beyond the maximum."""
        self.evict(self.nbytes - self._max_bytes)

    def evict(self, num_bytes: int) -> int:
        """Evicts features until `num_bytes` bytes are freed, or all have a user. Returns the number
        of freed bytes."""
        freed = 0
        for key, entry in list(self._entries.items()):
            if freed >= num_bytes:
                break
            if not entry.users:
                freed += entry.nbytes
                del self._entries[key]
        return freed


def list_arrays(features: ImageFeatures) -> list[mx.array]:
    return [features.rows, *features.deepstack]
