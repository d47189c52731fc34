"""The images in a rendered prompt: where the chat template put them, and the text of their tokens.

Knows: the mark that a template writes for an image, the plans of images. Must not know: templates,
pixels, token IDs.

A template writes the same mark for each image, so the images of a prompt are its marks in order. If
a message, a tool or a variable contains the mark as text, a private name replaces it while the
template is rendered. Such text is therefore never treated as an image.

    rendered    Look: <|image_pad|> What is \\uf8f1\\uf8f2\\uf8f3?
    keyed       Look: \\uf8f4 9f86d0…\\uf8f5 What is <|image_pad|>?
    expanded    Look: <|image_pad|><|image_pad|><|image_pad|> What is <|image_pad|>?

The keyed text contains the key of each image, so it differs for different images. Generated turns
(app/text/generated_turns.py) are found and restored in it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from app.core.errors import AppError, ErrorKind
from app.core.images import Image, PlacedImage, join_parts, split_parts
from app.core.requests import Message, Tool, ToolCall
from app.images.plan import ImagePlan, ImageProcessor
from app.text.generated_turns import EditedText

# private-use characters: a name begins and ends with different ones, so that no text around it can
# be a part of it
_START, _FILL, _END, _KEY_START, _KEY_END = "\uf8f1", "\uf8f2", "\uf8f3", "\uf8f4", "\uf8f5"
_NAME = re.compile(f"{_START}({_FILL}*){_END}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImage:
    """An image in the text of a prompt. start: the position of `plan.text`."""

    image: Image
    plan: ImagePlan
    key: bytes
    start: int


class ImageMarks:
    """The marks of the images in one request."""

    def __init__(
        self,
        processor: ImageProcessor,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
    ) -> None:
        """messages, tools, variables: everything of the request that the template renders."""
        self._processor = processor
        self._mark = processor.mark
        self._escaped = _find_unused_name(_iter_texts(messages, tools, variables))
        self.messages = [_map_message(message, self._escape) for message in messages]
        self.tools = tuple(_map_tool(tool, self._escape) for tool in tools)
        self.variables = {name: _map_json(value, self._escape) for name, value in variables.items()}

    def _escape(self, text: str) -> str:
        return text.replace(self._mark, self._escaped)

    def add_keys(self, rendered: str, messages: Sequence[Message]) -> "KeyedPrompt":
        """Replaces the marks in a rendered prompt by the keys of the images. messages: those that
        the template rendered, in order. Raises AppError(INVALID) if the prompt does not contain
        each image once."""
        placed = [one for message in messages for one in message.images]
        pattern = re.compile(f"{re.escape(self._mark)}|{self._escaped}")
        found = list(pattern.finditer(rendered))
        count = sum(match[0] == self._mark for match in found)
        if count != len(placed):
            raise _make_count_error(placed, count)
        images = iter(placed)
        keyed: list[KeyedImage] = []
        parts: list[tuple[int, int, str]] = []
        for match in found:
            text = self._mark
            if match[0] == self._mark:
                keyed.append(self._make_keyed(next(images)))
                text = keyed[-1].name
            parts.append((match.start(), match.end(), text))
        return KeyedPrompt(text=EditedText.replace(rendered, parts), images=tuple(keyed))

    def _make_keyed(self, placed: PlacedImage) -> "KeyedImage":
        assert isinstance(placed.image, Image), "addresses are fetched before"
        plan = self._processor.plan(placed.image)
        key = plan.key(placed.image)
        name = f"{_KEY_START}{self._escaped}{key.hex()}{_KEY_END}"
        return KeyedImage(image=placed.image, plan=plan, key=key, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedImage:
    """name: the text in place of the image's mark."""

    image: Image
    plan: ImagePlan
    key: bytes
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedPrompt:
    """A prompt in which the name of each image is in place of its mark."""

    text: EditedText
    images: tuple[KeyedImage, ...]

    def expand(self, text: str) -> tuple[EditedText, tuple[PromptImage, ...]]:
        """Replaces the names in a text, in which parts without images may have been edited, with
        the text of the image tokens."""
        parts: list[tuple[int, int, str]] = []
        images: list[PromptImage] = []
        end = moved = 0
        for one in self.images:
            start = text.find(one.name, end)
            assert start >= 0, "only parts without images are edited"
            end = start + len(one.name)
            parts.append((start, end, one.plan.text))
            images.append(
                PromptImage(image=one.image, plan=one.plan, key=one.key, start=start + moved)
            )
            moved += len(one.plan.text) - len(one.name)
        return EditedText.replace(text, parts), tuple(images)


def _make_count_error(placed: Sequence[PlacedImage], count: int) -> AppError:
    param = placed[0].image.param
    what = (
        f"renders {count} of the {len(placed)} images of this conversation"
        if count < len(placed)
        else "renders an image more than once"
    )
    message = (
        f"{param}: the model's chat template {what}: put images only in messages of the user, or "
        "remove them"
    )
    return AppError(ErrorKind.INVALID, message, param=param)


def _find_unused_name(texts: Iterable[str]) -> str:
    """Returns a string that occurs in none of these, in linear time."""
    lengths = (len(found[1]) for text in texts for found in _NAME.finditer(text))
    return _START + _FILL * (1 + max(lengths, default=0)) + _END


def _iter_texts(
    messages: Iterable[Message], tools: Iterable[Tool], variables: Mapping[str, Any]
) -> Iterator[str]:
    found: list[str] = []

    def collect(text: str) -> str:
        found.append(text)
        return text

    for message in messages:
        _map_message(message, collect)
    for tool in tools:
        _map_tool(tool, collect)
    _map_json(dict(variables), collect)
    yield from found


def _map_message(message: Message, change: Callable[[str], str]) -> Message:
    parts = [
        part if isinstance(part, PlacedImage) else change(part)
        for part in split_parts(message.content, message.images)
    ]
    content, images = join_parts(parts, "")
    return replace(
        message,
        content=None if message.content is None and not content else content,
        images=images,
        reasoning=None if message.reasoning is None else change(message.reasoning),
        name=None if message.name is None else change(message.name),
        tool_calls=tuple(
            ToolCall(id=call.id, name=change(call.name), arguments=change(call.arguments))
            for call in message.tool_calls
        ),
    )


def _map_tool(tool: Tool, change: Callable[[str], str]) -> Tool:
    return replace(
        tool,
        description=None if tool.description is None else change(tool.description),
        parameters=_map_json(tool.parameters, change),
    )


def _map_json(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case dict():
            mapping = cast("dict[str, Any]", value)
            return {change(name): _map_json(one, change) for name, one in mapping.items()}
        case list():
            return [_map_json(one, change) for one in cast("list[Any]", value)]
        case _:
            return value
