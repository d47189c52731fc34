"""A small template language, and random variations of how users phrase a question.

Knows: strings and a random generator. Must not know: the content of the questions.
"""

import random
import re
from collections.abc import Mapping

_CHOICE = re.compile(r"\{([^{}]*)\}")
_PHRASE = re.compile(r"\$(\w+)")

_OPENINGS = (
    *(
        "please ",
        "hey, ",
        "hi, ",
        "hello, ",
        "hi! ",
        "hey there, ",
        "so ",
        "ok, ",
        "okay, ",
        "well, ",
    ),
    *(
        "um, ",
        "and ",
        "now ",
        "quick question: ",
        "question: ",
        "excuse me, ",
        "sorry, ",
        "listen, ",
    ),
    *("can you tell me: ", "could you tell me, ", "tell me, ", "do you know, ", "I wonder, "),
    *("one more thing: ", "by the way, ", "just curious, ", "hm, ", "alright, ", "next: ", "but "),
    *(
        "I am new here. ",
        "my boss asks: ",
        "we use it at work. ",
        "I read the readme, but ",
        "ah, ",
    ),
    *(
        "I am writing an app. ",
        "I have just installed everything. ",
        "sorry to ask, ",
        "let me ask: ",
    ),
    *(
        "a friend showed me this. ",
        "I looked and found nothing. ",
        "thanks! ",
        "in short: ",
        "also, ",
    ),
    *(
        "for my notes: ",
        "remind me: ",
        "say, ",
        "one question, ",
        "I forgot, ",
        "be honest, ",
        "great. ",
    ),
    *("good morning, ", "good day! ", "good afternoon, ", "hello there! ", "hey! ", "dear model, "),
)
_CLOSINGS = (
    *(" please", ", please", " thanks", ", thanks", " thank you", ", thank you", " now", " again"),
    *(" exactly", " here", " then", ", if I may ask", " by any chance", ", do you know", " :)"),
    *(", in short", ", quickly", " for me", " today", " or not", ", in one line", " on my side"),
    *(" in my case", ", if possible", " these days", " as a beginner", ", I want to know"),
)
_FILLERS = (
    "actually",
    "really",
    "just",
    "maybe",
    "simply",
    "perhaps",
    "basically",
    "kindly",
    "also",
)
_DROPPABLE_WORDS = frozenset(
    {"a", "an", "the", "do", "does", "is", "to", "i", "me", "please", "of", "for"}
)
_NOISE_WORDS: tuple[str, ...] = (
    *("my", "your", "this", "that", "here", "there", "now", "then", "when"),
    *("while", "from", "with", "about", "into", "over", "after", "before", "some"),
    *("any", "all", "much", "more", "less", "very", "quite", "so", "as"),
    *("by", "at", "on", "in", "up", "out", "off", "if", "or"),
    *("but", "and", "because", "would", "could", "should", "might", "must", "shall"),
    *("will", "has", "have", "had", "been", "being", "gets", "got", "made"),
    *("let", "lets", "somebody", "someone", "people", "friend", "boss", "team", "kid"),
    *("home", "work", "day", "thing", "stuff", "way", "place", "time", "really"),
    *("maybe", "actually", "simply", "right", "good", "nice", "quick", "little", "big"),
    *("old", "own", "first", "last", "same", "other", "tell", "say", "know"),
    *("think", "guess", "wonder", "understand", "mean", "seem", "look", "try", "like"),
    *("give", "take", "put"),
)
_KEY_NEIGHBOURS = {"a": "s", "e": "r", "i": "o", "o": "p", "n": "m", "t": "r", "s": "d", "h": "j"}

# alternatives for single words, without regard to grammar, as users write them
_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "request": ("query", "call", "http call", "message"),
    "endpoint": ("route", "url", "path", "address", "uri", "resource", "link"),
    "answer": ("reply", "response", "output", "result"),
    "text": ("string", "sentence", "paragraph", "words", "letters"),
    "server": ("service", "daemon", "process", "app", "thing", "machine"),
    "computer": ("pc", "laptop", "machine", "box", "workstation", "device"),
    "tests": ("test suite", "test cases", "unit tests", "checks"),
    "model": ("llm", "language model", "network", "neural network"),
    "how": ("how exactly", "in which way", "any idea how"),
    "want": ("wish", "plan", "intend", "hope", "try"),
    "need": ("require", "must have", "want"),
    "show": ("display", "give", "print"),
    "whole": ("entire", "complete", "full"),
    "bigger": ("larger", "stronger", "huge"),
    "find": ("locate", "discover", "spot"),
    "use": ("employ", "utilize", "try", "rely on", "work with", "go with"),
    "get": ("obtain", "receive", "fetch", "grab", "take"),
    "stop": ("end", "halt", "quit", "terminate", "shut down"),
    "start": ("launch", "boot", "begin", "bring up"),
    "send": ("pass", "submit", "hand", "deliver"),
    "again": ("once more", "anew", "another time"),
    "folder": ("directory", "dir", "path"),
    "program": ("application", "tool", "app", "software"),
    "now": ("currently", "at present", "right now"),
    "every": ("each",),
    "story": ("tale",),
    "tell": ("give", "show"),
    "can": ("could", "may", "might"),
    "which": ("what",),
    "what": ("which",),
    "run": ("execute", "start", "operate"),
    "check": ("verify", "inspect", "see"),
    "code": ("source", "source code"),
    "ids": ("numbers", "token numbers", "integers"),
    "my": ("our", "the"),
    "we": ("I",),
    "supported": ("possible", "available", "allowed", "there"),
    "made": ("created", "produced"),
    "words": ("text", "sentences"),
    "download": ("fetch", "get", "load", "grab", "save"),
    "open": ("see", "visit", "go to", "look at"),
    "browser": ("web browser", "firefox", "chrome", "safari"),
    "terminal": ("shell", "console", "command line", "bash"),
    "command": ("subcommand", "line", "instruction"),
    "key": ("api key", "token", "secret", "credential"),
    "keys": ("api keys", "tokens", "credentials"),
    "agent": ("coding agent", "assistant", "coding assistant"),
    "agents": ("coding agents", "assistants"),
    "page": ("web page", "site", "website"),
    "chat": ("talk", "converse", "conversation"),
    "memory": ("ram", "vram"),
    "machine": ("computer", "laptop", "box", "pc", "host"),
    "work": ("function", "run", "go"),
    "file": ("document", "text file", "log"),
    "fast": ("quick", "speedy"),
    "slow": ("sluggish", "so slow", "slower"),
    "question": ("prompt", "query"),
    "prompt": ("question", "text", "input"),
    "colleague": ("coworker", "friend", "teammate", "user"),
    "colleagues": ("coworkers", "friends", "teammates", "users"),
    "wait": ("sit there", "wait long", "be patient"),
    "see": ("view", "look at", "check", "read"),
    "begin": ("start", "get going"),
    "supports": ("knows", "allows"),
    "support": ("know", "allow", "offer", "handle"),
    "create": ("make", "generate", "produce", "issue"),
    "local": ("own", "private", "offline"),
    "others": ("other people", "other machines", "strangers", "my coworkers"),
    "loaded": ("in memory", "in ram", "resident"),
    "live": ("as it happens", "in real time"),
}
# spellings of names, which the templates have in lower case
_NAMES: Mapping[str, tuple[str, ...]] = {
    **{
        name.lower(): (name,)
        for name in (
            *("Mac", "Macs", "MacBook", "MacBooks", "iMac", "macOS", "M1", "M2", "M3", "M4"),
            *("Apple", "Apple's", "Metal", "Intel", "AMD", "Linux", "Ubuntu", "Debian", "Fedora"),
            *("Windows", "CUDA", "GPU", "GPUs", "CPU", "CPUs", "RTX", "GTX", "GeForce", "Tesla"),
            *("A100", "H100", "H200", "Ollama", "Ollama's", "Anthropic", "Anthropic's", "Claude"),
            *("Codex", "Aider", "Cline", "Llama", "Qwen", "Qwen3", "Gemma", "Mistral", "Phi"),
            *("Hugging", "OpenCode", "Python", "HTTP", "JSON", "URL", "URLs", "API", "APIs"),
            *("SDK", "AI", "LLM", "LLMs", "RAM", "VRAM", "SSE", "ID", "IDs", "Docker", "Firefox"),
            *("Chrome", "Safari", "MIT", "PC", "SSH", "LAN", "WiFi", "KV", "GB", "OS", "OpenAPI"),
            *("Jupyter", "LangChain", "LlamaIndex", "Unix", "Bash", "Kubernetes", "GUI", "UI"),
            *("CSV", "MLX", "ChatGPT", "GPT", "Ctrl-C", "Monday", "English", "German", "French"),
        )
    },
    "nvidia": ("NVIDIA", "Nvidia"),
    "openai": ("OpenAI", "OpenAI", "OpenAi"),
    "openai's": ("OpenAI's",),
    "face": ("Face",),
}
# a name is not part of a path, of an address or of a model's tag
_WORD = re.compile(r"(?<![\w/.:-])[a-z][a-z0-9]*(?:-[a-z]|'s)?(?![\w/]|[-:.]\w)")
_CONTRACTIONS = (
    ("I would", "I'd"),
    ("I have", "I've"),
    ("I am", "I'm"),
    ("we have", "we've"),
    ("we are", "we're"),
    ("what is", "what's"),
    ("where is", "where's"),
    ("how is", "how's"),
    ("who is", "who's"),
    ("there is", "there's"),
    ("that is", "that's"),
    ("it is", "it's"),
    ("you are", "you're"),
    ("is not", "isn't"),
    ("do not", "don't"),
    ("does not", "doesn't"),
    ("cannot", "can't"),
    ("will not", "won't"),
)


def expand(template: str, rng: random.Random, phrases: Mapping[str, str]) -> str:
    """Expands `template` randomly.

    `{a|b|}` is one of its alternatives, which may nest; `$name` is the template of that name in
    `phrases`. Runs of spaces, which empty alternatives leave behind, become one.
    """
    while _PHRASE.search(template):
        template = _PHRASE.sub(lambda found: phrases[found[1]], template)
    while _CHOICE.search(template):
        template = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), template)
    return re.sub(r" +([?!.,])?", lambda found: found[1] or " ", template).strip()


def reword(question: str, rng: random.Random) -> str:
    """Returns `question` with random contractions, synonyms, omitted small words and typing
    errors."""
    for long, short in _CONTRACTIONS:
        if f"{long} " in question and rng.random() < 0.5:
            question = re.sub(rf"\b{long}\b", short, question)
    words: list[str] = []
    for word in question.split(" "):
        chance = rng.random()
        if word in _SYNONYMS and chance < 0.15:
            words.append(rng.choice(_SYNONYMS[word]))
        elif word in _DROPPABLE_WORDS and chance < 0.04:
            continue
        else:
            words.append(word)
    if rng.random() < 0.08:
        words.insert(rng.randint(0, len(words) - 1) if words else 0, rng.choice(_FILLERS))
    said = " ".join(words) or question
    return _add_typo(said, rng) if rng.random() < 0.1 else said


def add_noise(question: str, rng: random.Random, share: float) -> str:
    """With probability `share`: the question with some words removed, and others inserted that are
    irrelevant or do not exist. This trains the model to find the relevant words anywhere in a
    question."""
    if share == 0 or rng.random() >= share:
        return question
    words: list[str] = []
    for word in question.split(" "):
        chance = rng.random()
        if chance >= 0.14:
            words.append(_noise_word(rng) if chance < 0.22 else word)
    for _ in range(rng.choice((0, 0, 0, 1, 2, 4))):
        words.insert(rng.randint(0, len(words)), _noise_word(rng))
    return " ".join(words) or question


def add_politeness(question: str, rng: random.Random) -> str:
    """Returns `question` with a random opening, closing, punctuation and case."""
    if rng.random() < 0.25:
        question = rng.choice(_OPENINGS) + question
    ending = question[-1] if question[-1] in "?!." else ""
    body = question.removesuffix(ending)
    if rng.random() < 0.12:
        body += rng.choice(_CLOSINGS)
    if rng.random() < 0.35:
        ending = rng.choice(("", "", "", "?", ".", "!", "??", "...", " ?"))
    return _recase(body + ending, rng)


def capitalize(text: str) -> str:
    """Returns `text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def normalize(text: str) -> str:
    """Converts a question to lower-case words and digits with single spaces, for comparisons."""
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def _recase(text: str, rng: random.Random) -> str:
    style = rng.random()
    if style < 0.35:
        return text.lower()
    if style < 0.37:
        return text.upper()
    if rng.random() < 0.75:
        text = _spell_names(text, rng)
    return capitalize(text) if style < 0.93 else text


def _spell_names(text: str, rng: random.Random) -> str:
    """Returns `text` with the usual upper-case letters of names such as NVIDIA and MacBook."""
    return _WORD.sub(lambda found: rng.choice(_NAMES.get(found[0], (found[0],))), text)


def _noise_word(rng: random.Random) -> str:
    """Returns an irrelevant word: a common word, or random syllables."""
    if rng.random() < 0.6:
        return rng.choice(_NOISE_WORDS)
    syllables = (
        rng.choice("bdfgklmnprstvw") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))
    )
    return "".join(syllables) + rng.choice(("", "n", "r", "s", "t"))


def _add_typo(text: str, rng: random.Random) -> str:
    """Adds one typing error. Digits are unchanged, because the answer depends on them."""
    letters = [at for at, char in enumerate(text[:-1]) if char.isalpha() and text[at + 1].isalpha()]
    if not letters:
        return text
    at = rng.choice(letters)
    before, char, after = text[:at], text[at], text[at + 1 :]
    match rng.randrange(4):
        case 0:
            return before + after
        case 1:
            return before + char + char + after
        case 2:
            return before + after[0] + char + after[1:]
        case _:
            return before + _KEY_NEIGHBOURS.get(char, char) + after
