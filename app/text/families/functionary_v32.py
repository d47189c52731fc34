"""The output of Functionary 3.2 has several parts, each addressed to `all` or to a function.

    all
    Let me see.>>>get_weather
    {"city": "Oslo"}

Knows: the separators between the parts. Must not know: the parser of the parts
(`app/text/syntax/recipients.py`).

Source: MeetKai's chat template of Functionary medium v3.2.
"""

from app.text.syntax.recipients import RecipientFamily


class Family(RecipientFamily):
    separator = ">>>"
    opening = "\n"
    content_prefix = f"all{opening}"

    def matches(self, template: str) -> bool:
        return ">>>all" in template
