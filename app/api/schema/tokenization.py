"""The request bodies of tokenization and of rendered prompts.

Knows: the fields of vLLM and llama.cpp. Must not know: how a conversation is rendered.
"""

from typing import Annotated, Any, ClassVar

from app.api.schema.base import NULL, Model, Options, TokenId, describe, reject_fields
from app.api.schema.decode import BodyDecoder
from app.api.schema.generation import (
    EnableThinking,
    OpenRouterReasoning,
    ReasoningEffort,
    Thinking,
    ThinkingBudget,
)
from app.api.schema.messages import Message, Messages
from app.api.schema.openai import ChatBody, TemplateOptions
from app.api.schema.tools import ToolChoice, Tools


class ConversationBody(Options, kw_only=True, frozen=True):
    """The fields of a chat completion that affect its prompt."""

    unsupported = reject_fields(
        add_special_tokens=(False,),
        continue_final_message=(False,),
        chat_template=(),
        media_io_kwargs=(dict[str, str](),),
        mm_processor_kwargs=(dict[str, str](),),
    )

    model: Model = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[
        bool | None, describe("As in a chat completion. Requires `tools`.")
    ] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None, describe("The amount of reasoning, as in a chat completion.")
    ] = None
    reasoning: OpenRouterReasoning | None = None
    enable_thinking: EnableThinking = None
    thinking: Thinking = None
    thinking_budget: ThinkingBudget = None
    thinking_token_budget: ThinkingBudget = None
    thinking_budget_tokens: ThinkingBudget = None
    reasoning_budget_tokens: ThinkingBudget = None
    chat_template_kwargs: TemplateOptions = NULL
    add_generation_prompt: Annotated[
        bool | None, describe("If false, omit the beginning of the assistant turn.")
    ] = None

    def to_chat(self, messages: list[Message]) -> ChatBody:
        """Returns the body of a chat completion with these fields."""
        names = ChatBody.__struct_fields__
        shared = [name for name in ConversationBody.__struct_fields__ if name in names]
        fields: dict[str, Any] = {name: getattr(self, name) for name in shared}
        return ChatBody(messages=messages, **fields)


class TemplateBody(ConversationBody, kw_only=True, frozen=True):
    """The body of POST /apply-template."""

    messages: Messages


class TokenizeBody(ConversationBody, kw_only=True, frozen=True):
    """The body of POST /tokenize: text, or a conversation."""

    unsupported: ClassVar = {**ConversationBody.unsupported, **reject_fields(parse_special=(True,))}

    prompt: Annotated[str | None, describe("The text, under vLLM's name.")] = None
    content: Annotated[
        str | None,
        describe(
            "The text, under llama.cpp's name. The model's initial special tokens are added only "
            "with `add_special`."
        ),
    ] = None
    text: Annotated[str | None, describe("The text, under the name of other servers.")] = None
    messages: Messages | None = None
    add_special_tokens: Annotated[
        bool | None, describe("Add the model's initial special tokens, usually BOS.")
    ] = None
    add_special: Annotated[bool | None, describe("llama.cpp's name for `add_special_tokens`.")] = (
        None
    )
    return_token_strs: Annotated[
        bool | None, describe("Return the token strings in `token_strs`.")
    ] = None
    with_pieces: Annotated[
        bool | None,
        describe("Return each token as an object with ID and text, as in llama.cpp."),
    ] = None


class DetokenizeBody(Options, kw_only=True, frozen=True):
    """The body of POST /detokenize."""

    tokens: Annotated[list[TokenId], describe("The token IDs.")]
    model: Model = None


TEMPLATE = BodyDecoder(TemplateBody)
TOKENIZE = BodyDecoder(TokenizeBody)
DETOKENIZE = BodyDecoder(DetokenizeBody)
