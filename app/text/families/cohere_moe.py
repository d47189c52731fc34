"""Cohere2MoE: as Command A, but that the text stands between other tokens.

Source: the chat template of these models.
"""

from app.text.families import cohere


class Family(cohere.Family):
    lead = "<|START_TEXT|>"
    tail = "<|END_TEXT|>"
    markers = (*cohere.Family.markers, lead, tail)
