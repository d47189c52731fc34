"""How long a request may be.

Knows: numbers, and the words that tell them. Must not know: ids, requests, layer caches.
"""

from dataclasses import dataclass

from app.core.jobs import Capacity
from app.core.settings import MEBIBYTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How long a request may be, and what sets it. model: positions that the model was made for.
    asked: Settings.context. capacity: None until the model is loaded."""

    model: int
    asked: int | None
    capacity: Capacity | None

    @property
    def context(self) -> int:
        if self.capacity is not None:
            return self.capacity.context
        return self.model if self.asked is None else min(self.model, self.asked)

    def refusal(self, length: int) -> str:
        """Why a prompt of `length` tokens cannot be served, and what to do. Such a prompt will not
        fit later either: it is not others that stand in its way."""
        capacity = self.capacity
        need = "at least one of which is needed for the output"
        if capacity is not None and capacity.limited_by_memory:
            wanted = (length + 1) / capacity.context * capacity.kv_bytes / MEBIBYTE
            return (
                f"but only {capacity.context} tokens fit in memory, {need} (it needs about "
                f"{wanted:.1f} MiB of KV cache, and a request can have "
                f"{capacity.kv_bytes / MEBIBYTE:.1f} MiB): shorten the prompt, or increase --memory"
            )
        if self.context < self.model:
            return (
                f"but the server's context is {self.context} tokens, {need} (the model's own is "
                f"{self.model}): shorten the prompt, or increase --context"
            )
        return f"but the model's context is {self.context} tokens, {need}: shorten the prompt"
