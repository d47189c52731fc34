"""OpenAI's prompts of plain completions: a text, token ids, or several of either.

Knows how they may be written, and how many there may be. Must not know: the vocabulary.
"""

from app.api.fields import Fields, as_array, as_token_ids, invalid_request, quote_value
from app.core.requests import Prompt, PromptBatch

# Answers to one request, and so the prompts of one: OpenAI's limit for `n`.
MAX_CHOICES = 128


def read_prompt(fields: Fields) -> Prompt:
    value: object = fields.required("prompt")
    if isinstance(value, str):
        return value
    items = as_array(value)
    if not items:
        wanted = "a string, an array of token ids, or an array of these"
        raise invalid_request("prompt", f"prompt must be {wanted}, not {quote_value(value)}")
    if not isinstance(items[0], str | list):
        return as_token_ids(items, "prompt")
    if len(items) > MAX_CHOICES:
        raise invalid_request("prompt", f"prompt must hold at most {MAX_CHOICES}, not {len(items)}")
    prompts = tuple(_read_prompt_item(item, f"prompt.{place}") for place, item in enumerate(items))
    return prompts[0] if len(prompts) == 1 else PromptBatch(prompts=prompts)


def read_n(fields: Fields, prompt: Prompt) -> int:
    """`n`, answers to each prompt."""
    return check_choice_limit("n", fields.integer("n", 1, MAX_CHOICES) or 1, prompt)


def check_choice_limit(name: str, count: int, prompt: Prompt) -> int:
    """That many answers to each prompt, if all of them together are not too many."""
    prompts = count_prompts(prompt)
    if count * prompts > MAX_CHOICES:
        raise invalid_request(
            name,
            f"{name}: {count} for each of {prompts} prompts are {count * prompts} choices; a "
            f"request may have at most {MAX_CHOICES}",
        )
    return count


def count_prompts(prompt: Prompt) -> int:
    return len(prompt.prompts) if isinstance(prompt, PromptBatch) else 1


def _read_prompt_item(item: object, path: str) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    ids = as_array(item)
    if ids is None:
        raise invalid_request(
            path, f"{path} must be a string or an array of token ids, not {quote_value(item)}"
        )
    if not ids:
        raise invalid_request(path, f"{path} must hold at least one token id")
    return as_token_ids(ids, path)
