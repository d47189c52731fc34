"""Generates short stories from templates, in the style of TinyStories (Eldan and Li, 2023): few
words, simple sentences, a beginning, a small problem and a good end.

Knows: story templates. Must not know: any other ability.
"""

import random
import re

from tools.builtin_model.augmentation import expand

HEROES = (
    *(
        "cat",
        "dog",
        "mouse",
        "bird",
        "bear",
        "rabbit",
        "fox",
        "frog",
        "duck",
        "fish",
        "horse",
        "owl",
    ),
    *(
        "robot",
        "dragon",
        "unicorn",
        "princess",
        "boy",
        "girl",
        "wizard",
        "turtle",
        "lion",
        "elephant",
    ),
    *(
        "penguin",
        "monkey",
        "king",
        "queen",
        "knight",
        "cow",
        "pig",
        "sheep",
        "bee",
        "snail",
        "whale",
    ),
    *(
        "squirrel",
        "hedgehog",
        "wolf",
        "tiger",
        "giraffe",
        "pirate",
        "fairy",
        "giant",
        "ghost",
        "star",
    ),
    *(
        "train",
        "boat",
        "tree",
        "cloud",
        "kitten",
        "puppy",
        "goat",
        "deer",
        "butterfly",
        "ant",
        "crab",
    ),
)
NAMES = (
    *("Lily", "Tom", "Max", "Mia", "Sam", "Lucy", "Ben", "Zoe", "Bella", "Leo", "Nina", "Oscar"),
    *("Rosie", "Finn", "Daisy", "Toby"),
)

PHRASES = {
    "kind": "{little|small|young|brave|kind|shy|happy|curious}",
    "place": "{in a green forest|in a small house|near a blue lake|on a high hill|by the sea|"
    "in a quiet village|in a big garden|under an old tree}",
    "wish": "{to see the sea|to find a friend|to touch the moon|to learn to sing|to bake a cake|"
    "to fly a kite|to see the snow|to climb the hill}",
    "thing": "{red ball|shiny stone|little bell|blue hat|golden key|warm scarf|small lamp|old map}",
    "friend": "{an old owl|a small bird|a kind bear|a wise turtle|a friendly frog|a funny mouse|"
    "a gentle cow|a quiet hedgehog}",
    "end": "{That night everyone slept well.|From that day on they were friends.|"
    "And they all lived happily ever after.|It was the best day of all.|"
    "Then it was time to go home and sleep.|They laughed and danced until the stars came out.}",
}
_OPENING = (
    "{Once upon a time there was|Once upon a time there lived|Once there was|There once was} "
    "a $kind HERO named NAME. NAME lived $place. "
)
_PLOTS = (
    "One day NAME lost a $thing. NAME looked everywhere, but it was gone. Then $friend came by and "
    "helped to search. Together they found the $thing under a leaf. NAME was very happy and said "
    "thank you. ",
    'NAME wanted $wish, but the way was long. One morning NAME met $friend. "Do not be afraid," '
    'said the new friend. "We will go together." They walked all day, and at last the wish came '
    "true. ",
    'One day it began to rain, and NAME was cold and wet. $friend opened the door and said, "Come '
    'in!" They drank warm milk and told each other stories. When the sun came back, they played '
    "outside. ",
    "One night NAME heard a strange sound. It was $friend who had fallen into a hole. NAME was "
    "afraid, but ran to get a rope. NAME pulled and pulled until the friend was free. ",
    "NAME had a $thing and did not want to share it. But playing alone was no fun. So NAME gave the "
    "$thing to $friend, and they played together. NAME learned that sharing is good. ",
)
_ASKS = (
    "{please|} tell {my kid|my child|the children|my niece|us|my grandson} {about HERO|a story about HERO|a tale|something about HERO|a bedtime story}{ before bed| before she falls asleep| tonight|}",
    "{how about|what about|I am in the mood for|I feel like|let's have|time for} {a|a nice|a little|a short} {story|tale|bedtime story}{ with HERO| about HERO|}{?|}",
    "{it is late|it is bedtime|I am in bed|I am awake}, {tell|read} me {something|a story|a tale} {about HERO|with HERO|about HERO|of HERO}",
    "{spin|weave|narrate|recount} {me|} {a tale|a yarn|a story} {about|with|of} HERO{ in it|}",
    "{write|tell|make|create|imagine} {something|a few sentences|a little something|a story} {where HERO|in which HERO} {is happy|finds a friend|appears|has an adventure}",
    "{tell|write|give|read} {me|us} {a|a short|a nice|a little|one more|another|a new|a small} story{ about HERO| about HERO| with HERO| for children| please| for kids| before I sleep|}",
    "{tell|write} a {short |tiny |funny |}{story|fairy tale|tale} about HERO{ named NAME|}",
    "{can|could|will|would} you {tell|write|make up|invent} {me |} a {story|short story|fairy tale|bedtime story}{ about HERO| about HERO| with HERO|}?",
    "{I want|I would like|I'd love|I wish} {to hear |} a {story|tale|fairy tale|short story|bedtime story}{ about HERO|}",
    "{story|a story|another story|story time|one more story|short story|fairy tale}{ about HERO| about HERO| please|}{!|}",
    "{do you know|have you got|do you have} {a story|any stories|a fairy tale|a nice story}{ about HERO| about HERO| for kids| for my son|}?",
    "{make up|invent|think of|come up with} {a story|something|a short tale|a new story} {about HERO|about HERO|with HERO|where HERO is the hero|for little children}",
    "{my kid|my child|my son|the baby|my little sister} {cannot sleep|wants a story|needs a story|wants to hear about HERO|asks for a story about HERO}",
    "{once upon a time|tell me something about HERO|entertain me with a story|what happened to HERO?|a tale of HERO|say something sweet about HERO}",
    "{write|tell} a {one sentence|one paragraph|three sentence|very short|cute|sweet|happy} {bedtime |}story{ about HERO|}",
)


def make_story(rng: random.Random, hero: str | None = None, name: str | None = None) -> str:
    """Six to nine short sentences about `hero`, or about a random one."""
    hero, name = hero or rng.choice(HEROES), name or rng.choice(NAMES)
    text = expand(_OPENING, rng, PHRASES).replace("HERO", hero)
    text += " " + _fill_plot(rng.choice(_PLOTS), rng) + " " + expand("$end", rng, PHRASES)
    return _capitalize_sentences(text.replace("NAME", name))


def make_story_turn(rng: random.Random) -> tuple[str, str]:
    question = expand(rng.choice(_ASKS), rng, {})
    hero = rng.choice(HEROES) if "HERO" in question else None
    name = rng.choice(NAMES) if "NAME" in question else None
    article = "an" if hero and hero[0] in "aeio" else "a"
    adjective = rng.choice(("", "", "", " little", " small", " brave"))
    shown = f"{'a' if adjective else article}{adjective} {hero}"
    question = question.replace("HERO", shown).replace("NAME", name or "")
    # repeating what was asked for makes it easy to learn to keep to it
    promise = f"Here is a story about {article} {hero}. " if hero else ""
    return question, promise + make_story(rng, hero, name)


def _fill_plot(plot: str, rng: random.Random) -> str:
    """`plot` with each phrase chosen once, however often it occurs."""
    chosen = {key: expand(template, rng, {}) for key, template in PHRASES.items()}
    return expand(plot, rng, chosen)


def _capitalize_sentences(text: str) -> str:
    """`text` with a capital at the start of each sentence; opening quotes are skipped."""
    return re.sub(r"(^|[.!?] )([a-z])", lambda found: found[1] + found[2].upper(), text)
