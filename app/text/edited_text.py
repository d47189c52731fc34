"""Texts in which parts were replaced, and where positions of the original are in them.

Knows: positions in characters. Must not know: what the parts mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Characters [start, end) of the original text were replaced by `length` characters."""

    start: int
    end: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedText:
    """A text in which parts of an original were replaced. edits: in ascending order."""

    text: str
    edits: tuple[Edit, ...] = ()

    @staticmethod
    def replace(text: str, parts: Sequence[tuple[int, int, str]]) -> "EditedText":
        """Replaces the parts (start, end, replacement) of a text, in ascending order."""
        pieces: list[str] = []
        done = 0
        for start, end, replacement in parts:
            pieces += (text[done:start], replacement)
            done = end
        return EditedText(
            text="".join((*pieces, text[done:])),
            edits=tuple(
                Edit(start=start, end=end, length=len(replacement))
                for start, end, replacement in parts
            ),
        )

    def map_position(self, position: int) -> int:
        """Converts a position in the original text. A position within a replaced part is mapped to
        the start of the part."""
        moved = 0
        for edit in self.edits:
            if edit.start < position < edit.end:
                return edit.start + moved
            if edit.end <= position:
                moved += edit.length - (edit.end - edit.start)
        return position + moved
