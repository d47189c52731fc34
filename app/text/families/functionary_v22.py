"""The output of Functionary 2.2 has several parts, each addressed to `all` or to a function.

    all
    <|content|>Let me see.
    <|from|>assistant
    <|recipient|>get_weather
    <|content|>{"city": "Oslo"}

Knows: the separators between the parts. Must not know: the parser of the parts
(`app/text/syntax/recipients.py`).

Source: MeetKai's chat template of Functionary medium v2.2.
"""

from app.text.syntax.recipients import RecipientFamily


class Family(RecipientFamily):
    markers = ("<|from|>", "<|recipient|>", "<|content|>")
    separator = "<|from|>assistant\n<|recipient|>"
    gap = "\n"
    opening = "\n<|content|>"
    content_prefix = f"all{opening}"

    def matches(self, template: str) -> bool:
        return "<|recipient|>" in template and "<|content|>" in template
