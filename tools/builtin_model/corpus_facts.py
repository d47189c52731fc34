"""Facts about mlxrunner for the built-in model, and the frames of questions about them.

Knows: facts about the project, as templates of `augmentation.expand`. A fact can be asked for as a
whole question (`asks`), as something to do (`to`, in HOW or ROUTE frames) or as a topic (`about`).
Must not know: the held-out questions of questions.json.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FactTemplate:
    """answers: any of them is right. weight: how often it is drawn, relative to the others."""

    answers: tuple[str, ...]
    asks: tuple[str, ...] = ()
    to: tuple[str, ...] = ()
    route_to: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    weight: float = 1.0


PHRASES = {
    "it": "{mlxrunner|mlxrunner|mlxrunner|the server|this server|it|this|this program|this project}",
    "project": "{mlxrunner|mlxrunner|this project|the project|this software|this program|it}",
    "you": "{you|you|mlxrunner|the server|it}",
    "route": "{endpoint|endpoint|route|url|path|address|api|call|request}",
    "model": "{model|language model|llm|checkpoint}",
}

HOW_FRAMES = (
    "how {do|can|would|should|could} {I|we|you|someone|one} VERB?",
    "how to VERB?",
    "how to VERB",
    "{what|which} {command|line|option|way} {is there|do I need|do I use|should I use} to VERB?",
    "{tell|show|teach} me how {to|I can|I could} VERB",
    "explain how {to|I can|one can} VERB",
    "I {want|need|have|would like|am trying|wish} to VERB",
    "I'd {like|love} to VERB, {how|is that possible|what now|how does that go|can you help}?",
    "what {do|must|should|can} I do {to|if I want to|in order to} VERB?",
    "{is there a way|is it possible|what is the way|what is the best way|what does it take} to VERB?",
    "{can|could|may} {I|we|one|someone} VERB?",
    "help me {to|} VERB",
    "what {is|would be} the {command|right way|easiest way} to VERB?",
    "VERB, how?",
    "VERB",
)

ROUTE_FRAMES = (
    "{which|what} $route {do I use|should I use|can I use|is used|is there|do I need|lets me|serves} to VERB?",
    "{which|what} $route {is for|is the one to|would|do clients use to} VERB?",
    "where {do|can|should|must} I {send|post|make} a request to VERB?",
    "where {do|can|could|should} {I|a program|my script|an app} {go|look|ask|turn} to VERB?",
    "{is there|do you have|does the server have|is there perhaps} {an endpoint|a route|a url|a path|an api} to VERB?",
    "I {want|need|would like} to VERB, {which $route is it|which endpoint|what is the url|where|over which $route}?",
    "my {program|script|app|client|code} {wants|needs|has} to VERB, {how|which $route is right|what is the $route}?",
    "name the $route to VERB",
    "{endpoint|route|url} to VERB",
    "how {do|can|would|does} {I|a client|my program} VERB {over http|with a request|through the api|}?",
)

ABOUT_FRAMES = (
    "{what is|what's|what about|what are|tell me about|explain|describe|say something about} TOPIC?",
    "{can|could} you {explain|describe|tell me about} TOPIC?",
    "what {do you know|can you tell me|can you say} about TOPIC?",
    "{I have|I've got} a question about TOPIC",
    "TOPIC?",
    "TOPIC",
    "{do you|does mlxrunner|does it} {know|have|support} TOPIC?",
    "I {do not|don't} understand TOPIC",
    "{info|information|details|help} on TOPIC",
)
