"""What a model's template and tokenizer support, without loading the tokenizer.

Knows: chat templates, families, the tokens for filling in the middle. Must not know: requests,
where files are stored.
"""

from dataclasses import dataclass

from app.core.errors import AppError
from app.core.model_details import ReasoningSupport
from app.core.model_files import ModelFiles
from app.core.requests import ReasoningOptions
from app.text.capabilities import detect_capabilities
from app.text.chat_template import ChatTemplate
from app.text.family import find_family
from app.text.generic_tool_calls import GenericFamily
from app.text.infill import has_infill_tokens
from app.text.prompt import NONE_EFFORT, build_thinking_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """chat: whether the model has a chat template. tools: whether the template renders tools.
    infill: whether the tokenizer has tokens for filling in the middle. template: its text."""

    chat: bool
    tools: bool
    infill: bool
    reasoning: ReasoningSupport
    template: str


def read_model_traits(files: ModelFiles) -> ModelTraits:
    """Reads the traits of a model. Renders test conversations, so call it on a thread. Raises
    AppError(MODEL_FILES) if the template is broken, and OSError."""
    template = ChatTemplate(files)
    source = template.get_source(tools=True)
    family = find_family(source) or GenericFamily()
    return ModelTraits(
        chat=template.includes_special_tokens,
        tools=detect_capabilities(template.render).supports_tools,
        infill=has_infill_tokens(files.tokenizer_path.read_bytes()),
        reasoning=_read_reasoning(template) if family.reasoning_tags(source) else "none",
        template=source if template.includes_special_tokens else "",
    )


def _read_reasoning(template: ChatTemplate) -> ReasoningSupport:
    try:
        build_thinking_kwargs(
            ReasoningOptions(effort="none"),
            template.get_variables(tools=False),
            supports_reasoning=True,
            supports_none=NONE_EFFORT.search(template.get_source(tools=False)) is not None,
        )
    except AppError:
        return "always"
    return "optional"
