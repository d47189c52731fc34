"""Cohere2MoE uses the same format as Command A, but with different tokens around the text.

Knows: the different tokens. Must not know: the parser of calls.

Source: the chat template of these models.
"""

from app.text.families import cohere


class Family(cohere.Family):
    content_prefix = "<|START_TEXT|>"
    content_suffix = "<|END_TEXT|>"
    markers = (*cohere.Family.markers, content_prefix, content_suffix)
