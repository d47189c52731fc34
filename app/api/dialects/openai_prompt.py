"""OpenAI's prompts of plain completions: a text, token ids, or several of either.

Knows how they may be written, and how many there may be. Must not know: the vocabulary.
"""

from app.api.fields import Fields, as_array, as_ids, invalid, shown
from app.core.requests import Prompt, Several

# Answers to one request, and so the prompts of one: OpenAI's limit for `n`.
MOST_CHOICES = 128


def read_prompt(fields: Fields) -> Prompt:
    value: object = fields.required("prompt")
    if isinstance(value, str):
        return value
    items = as_array(value)
    if not items:
        wanted = "a string, an array of token ids, or an array of these"
        raise invalid("prompt", f"prompt must be {wanted}, not {shown(value)}")
    if not isinstance(items[0], str | list):
        return as_ids(items, "prompt")
    if len(items) > MOST_CHOICES:
        raise invalid("prompt", f"prompt must hold at most {MOST_CHOICES}, not {len(items)}")
    prompts = tuple(_one(item, f"prompt.{place}") for place, item in enumerate(items))
    return prompts[0] if len(prompts) == 1 else Several(prompts=prompts)


def read_count(fields: Fields, prompt: Prompt) -> int:
    """`n`, answers to each prompt."""
    return within_limit("n", fields.integer("n", 1, MOST_CHOICES) or 1, prompt)


def within_limit(name: str, count: int, prompt: Prompt) -> int:
    """That many answers to each prompt, if all of them together are not too many."""
    prompts = prompts_of(prompt)
    if count * prompts > MOST_CHOICES:
        raise invalid(
            name,
            f"{name}: {count} for each of {prompts} prompts are {count * prompts} choices; a "
            f"request may have at most {MOST_CHOICES}",
        )
    return count


def prompts_of(prompt: Prompt) -> int:
    return len(prompt.prompts) if isinstance(prompt, Several) else 1


def _one(item: object, path: str) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    ids = as_array(item)
    if ids is None:
        raise invalid(path, f"{path} must be a string or an array of token ids, not {shown(item)}")
    if not ids:
        raise invalid(path, f"{path} must hold at least one token id")
    return as_ids(ids, path)
