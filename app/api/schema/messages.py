"""OpenAI's messages: every documented role, the parts of their content, and earlier tool calls.

Knows: the fields of messages. Must not know: the order of messages, chat templates.

For images, audio and files, see app/api/attachments.py.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from app.api.schema.base import Identifier, Item, describe, ignore_fields, reject_fields
from app.core.sampling_params import INT64_MAX

ImageDetail = Annotated[
    Literal["auto", "low", "high", "original"] | None,
    describe(
        "`low` scales the image to about 512 × 512 pixels. The others scale it only to the model's "
        "limit.",
        component="ImageDetail",
    ),
]


class _Part(Item, kw_only=True, frozen=True, tag_field="type"):
    """A part of the content of a message. An error in its type has the path of the part."""

    tag_error_at_object: ClassVar[bool] = True


class TextPart(_Part, kw_only=True, frozen=True, tag="text"):
    """A text."""

    ignored = ignore_fields("cache_control")

    text: str


class RefusalPart(_Part, kw_only=True, frozen=True, tag="refusal"):
    """A refusal, which counts as text."""

    ignored = ignore_fields("cache_control")

    refusal: str


class ThinkingPart(_Part, kw_only=True, frozen=True, tag="thinking"):
    """Earlier reasoning, as Mistral's API returns it. Omitted."""

    ignored = ignore_fields("cache_control closed signature", thinking="The reasoning.")


class ImageUrl(Item, kw_only=True, frozen=True):
    """The image."""

    url: str | None = None
    detail: ImageDetail = None


class ImagePart(_Part, kw_only=True, frozen=True, tag="image_url"):
    """An image. For a text-only model, it is replaced with text, or rejected in a question."""

    # vLLM's name for an image that it may have cached
    ignored = ignore_fields("cache_control uuid")

    image_url: Annotated[
        str | ImageUrl | None, describe("A data URL, such as `data:image/png;base64,iVBO…`.")
    ] = None


class AudioPart(_Part, kw_only=True, frozen=True, tag="input_audio"):
    """Audio. Replaced with text, or rejected in a question."""

    ignored = ignore_fields("cache_control", input_audio="The audio.")


class FilePart(_Part, kw_only=True, frozen=True, tag="file"):
    """A file. Replaced with text, or rejected in a question."""

    ignored = ignore_fields("cache_control", file="The file.")


class VideoPart(_Part, kw_only=True, frozen=True, tag="video_url"):
    """vLLM's part for a video. Replaced with text, or rejected in a question."""

    ignored = ignore_fields("cache_control", video_url="The video, or its address.")


AttachmentPart = ImagePart | AudioPart | FilePart | VideoPart
AssistantPart = TextPart | RefusalPart | ThinkingPart | AttachmentPart
Part = TextPart | AttachmentPart
Content = Annotated[
    str | list[Part] | None,
    describe(
        "A string, or a list of parts. The texts are joined with newlines.",
        component="TextContent",
    ),
]


class CalledFunction(Item, kw_only=True, frozen=True):
    """The function of an earlier call."""

    ignored = ignore_fields("", parsed_arguments="The arguments parsed by OpenAI's SDK.")

    name: str
    arguments: Annotated[
        str | None,
        describe(
            "A JSON object as a string. Null and an empty string mean an empty object.",
            schema={"contentMediaType": "application/json", "contentSchema": {"type": "object"}},
        ),
    ] = None


class ToolCall(Item, kw_only=True, frozen=True):
    """An earlier call of a tool. Mistral's API leaves out the type."""

    id: str
    type: Literal["function"] | None = None
    function: CalledFunction
    index: Annotated[
        Annotated[int, Meta(ge=0, le=INT64_MAX)] | None,
        describe("The index of the call in a stream. Ignored; calls keep their order in the list."),
    ] = None


class _Message(Item, kw_only=True, frozen=True, tag_field="role"):
    """The fields of every message."""

    ignored = ignore_fields("annotations cache_control id")

    name: Identifier = None


class _PlainMessage(_Message, kw_only=True, frozen=True):
    """A message that has no calls and no reasoning."""

    unsupported = reject_fields(tool_calls=([],), reasoning_content=("",), reasoning=("",))

    content: Content = None


class SystemMessage(_PlainMessage, kw_only=True, frozen=True, tag="system"):
    """Instructions."""


class DeveloperMessage(_PlainMessage, kw_only=True, frozen=True, tag="developer"):
    """OpenAI's newer name of a system message."""


class UserMessage(_PlainMessage, kw_only=True, frozen=True, tag="user"):
    """A message of the user."""


class ToolMessage(_PlainMessage, kw_only=True, frozen=True, tag="tool"):
    """The result of a call."""

    tool_call_id: str


class SpokenAnswer(Item, kw_only=True, frozen=True):
    """An earlier response in audio. It is replaced by its transcript, or by a placeholder."""

    ignored = ignore_fields("data expires_at id")

    transcript: str | None = None


class AssistantMessage(_Message, kw_only=True, frozen=True, tag="assistant"):
    """An earlier model response. A `refusal` counts as content. Null, missing and empty content are
    the same. Fields that servers add to responses are accepted."""

    unsupported = reject_fields(function_call="use tool_calls")
    ignored = ignore_fields(
        "annotations cache_control id", parsed="The content parsed by OpenAI's SDK."
    )

    content: str | list[AssistantPart] | None = None
    refusal: str | None = None
    audio: SpokenAnswer | None = None
    reasoning_content: Annotated[
        str | None,
        describe(
            "The reasoning of this response, for templates that support it. `reasoning` is an "
            "alias. If both are set, they must be equal."
        ),
    ] = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[
    list[Annotated[Message, describe(component="Message")]],
    Meta(min_length=1),
    describe("The conversation, oldest message first."),
]
