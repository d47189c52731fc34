"""How long a request may be.

Knows: numbers, and the words that tell them. Must not know: ids, requests, layer caches.
"""

from dataclasses import dataclass

from app.core.jobs import Capacity
from app.core.settings import MEBIBYTE


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """How long a request may be, and what sets it. model_context: positions that the model was made
    for. configured_context: Settings.context. capacity: None until the model is loaded."""

    model_context: int
    configured_context: int | None
    capacity: Capacity | None

    @property
    def context_length(self) -> int:
        if self.capacity is not None:
            return self.capacity.context_length
        return (
            self.model_context
            if self.configured_context is None
            else min(self.model_context, self.configured_context)
        )

    def explain_too_long(self, num_tokens: int) -> str:
        """Why a prompt of `num_tokens` tokens cannot be served, and what to do. Such a prompt will
        not fit later either: it is not others that stand in its way."""
        capacity = self.capacity
        need = "at least one of which is needed for the output"
        if capacity is not None and capacity.limited_by_memory:
            wanted = (
                (num_tokens + 1)
                / capacity.context_length
                * capacity.kv_bytes_per_sequence
                / MEBIBYTE
            )
            return (
                f"but only {capacity.context_length} tokens fit in memory, {need} (it needs about "
                f"{wanted:.1f} MiB of KV cache, and a request can have "
                f"{capacity.kv_bytes_per_sequence / MEBIBYTE:.1f} MiB): shorten the "
                "prompt, or increase --memory"
            )
        if self.context_length < self.model_context:
            return (
                f"but the server's context is {self.context_length} tokens, {need} (the "
                "model's own is "
                f"{self.model_context}): shorten the prompt, or increase --context"
            )
        return (
            f"but the model's context is {self.context_length} tokens, {need}: shorten the prompt"
        )
