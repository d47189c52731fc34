"""Counting, adding, repeating and remembering a name: questions whose answers are computed.

Knows: templates of such questions, and their answers. Must not know: facts and small talk.
"""

import random

from tools.builtin_model.augmentation import capitalize, expand

Turn = tuple[str, str]

COUNT_LIMIT = 40
LONGEST_COUNT = 25
SUM_LIMIT = 20

_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty"),
)

_COUNT = (
    "{beginning|starting} {with|at|from} A, {count|count up|go up|count on|number on}{,|} {stopping|ending|and stop|and end} at B",
    "{let me hear|I want to hear|let us hear|go through|walk through|recite} {you count from A to B|the numbers A to B|A to B|the numbers from A up to B}{ for me|}",
    "{can|could|will} you {go through|list|say|recite|write out|give me} {the numbers|all numbers|the integers} {from A to B|A to B|A up to B|between A and B}{ for me|}?",
    "count: {from A, to B|A ... B|A up, end B|begin A, end B}",
    "the {sequence|series|row|list} {of numbers|of integers|} {from A to B|starting with A and ending with B|A to B}",
    "{count|count up|count for me|please count|keep counting|can you count|I want you to count|start counting} from A {to|up to|until|till|through|all the way to} B{?|.|}",
    "count {A to B|A up to B|from A, stop at B|A until B|up from A to B|numbers A to B|A - B|A..B}",
    "{the numbers|numbers|all numbers|all the numbers|the integers} {from A to B|A to B|from A up to B|starting at A and ending at B|between A and B|A until B}",
    "{say|list|write|show|print|tell me|name|recite|type|enumerate} {the numbers|all numbers|numbers|all the numbers|the whole numbers|integers} {from A to B|A to B|from A up to B|from A through B|between A and B|that lie from A to B}",
    "{begin|start} {with|at|from} A {and|then} {count|go on|count up|go up|continue} {to|until|up to} B",
    "what {are the numbers|numbers are there|numbers lie} {from A to B|between A and B}?",
    "{go|run} from A to B{ in steps of one|, counting|}",
    "{say|write|name|give|print} {all|the|each of the|all of the} {numbers|integers|whole numbers|values} {from A to B|between A and B|A to B}{ inclusive|, inclusive|, A and B too|, with A and B themselves|}",
    "A to B{, counting| in order|, number by number| please|}",
    "{what comes|which numbers come} {from A to B|when you count from A to B}?",
    "first A, then on {to|until} B",
    "{every|each|any|all the} {number|integer|whole number|numbers} {from A to B|between A and B|A to B}{, the ends too|, ends included|, including A and B| with both ends|, from first to last|}",
    "{say|write|name|list|print|tell me} {every|each} {number|integer|whole number} {from A to B|from A up to B|A to B}{, inclusive|, ends included| in order|, the ends too|}",
    "{from A to B|A to B}: {list|name|count|say} {them|all numbers|the numbers|every number}",
)
_COUNT_FROM_ONE = (
    "{let me hear you|I want you to|show me that you can} count {to|up to|as far as} B",
    "{one, two, three|1, 2, 3} and so on {to|up to|until} B",
    "{count|go} {from one|from the beginning|from the start|as far as|all the way} {to|up to|until} B",
    "{count|can you count|please count|count up|count for me} {to|up to|until} B{?|.|}",
    "how do you count to B?",
    "{say|list|write|give me|show} the first B numbers",
)
_COUNT_DOWN = (
    "{count|count down|count backwards|go down|please count down|can you count down|count back} from B {to|until|down to} A",
    "{the numbers|numbers|say the numbers|list the numbers} from B down to A",
    "{start at|begin at|begin with|start with} B and {count down|go down|count backwards} {to|until} A",
    "{count|count backwards|go backwards} {from B to A|B to A}",
)
_COUNT_DOWN_TO_ONE = (
    "{rocket launch|the rocket starts|new year|we launch now|get ready}{:|,} {count down|count backwards|countdown} from B",
    "{say|list|give me} the numbers backwards{,|} {starting|beginning} {at|with} B",
    "B seconds {to go|left|to launch|until midnight}, count {down|backwards|them down}",
    "{from B|B} {down|backwards}{, count|}{ to one| to the end|}",
    "{run|perform|start|do|begin} a countdown {of B|from B|with B first|at B}",
    "{count down|count backwards|count down for me|can you count down|please count down|start a countdown|countdown} from B{?|.|}",
    "{countdown|a countdown|launch countdown|give me a countdown|make a countdown|I need a countdown} {from B|starting at B|starting with B|of B}{, please|}",
)
_SUM = (
    "{put|take|bring|throw} A and B together{, what results|, what is it|, and you get|, how much}?",
    "there {were|are} A {birds|people|ducks|boys|THING} {on a wire|at home|on the table|in the yard|here} and B {others|more} {came|joined them|arrived|came along|were added}, how many {is that now|are there now|are they together|in all}?",
    "I {need|want|am looking for} {the answer to|the result of|the sum of|the total of} {A plus B|A and B|A + B}",
    "{quick|fast|sum|addition|math|add}{,|:} {A+B|A + B|A plus B|A and B}",
    "{sum|total|addition} of A and B{?|}",
    "A {increased by|raised by|with|together with|and then|and another} B {is|makes|gives|equals|becomes} {what|how much|which number}?",
    "what {number|result} do {I|you|we} {get|have} {from|for|with|out of} {A plus B|A and B|adding A and B|A and another B}?",
    "{my|our} {team|class|shop|friend} had A THING and {later|then} {got|won|bought|found} B more, {how many now|what is the total|how many altogether|so how many has it}?",
    "A THING {and|plus} B THING {are|make|is} {how many|what}{ THING|}?",
    "what is {A + B|A plus B|A and B|the sum of A and B|A added to B}?",
    "{what's|whats} {A + B|A plus B|A and B}?",
    "{A + B|A+B|A plus B|A and B}{?| =|=| = ?| is?| equals?| makes?|}",
    "how much is {A + B|A plus B|A and B|A+B|A and B together}?",
    "{calculate|compute|solve|evaluate|figure out} {A + B|A plus B|A+B|the sum of A and B|A and B}",
    "{add|sum|sum up|add up|add together} {A and B|A to B|A with B|the numbers A and B|A, B}{ for me|}",
    "{can|could} you {add|sum|add up} {A and B|A to B}{ for me|}?",
    "what {do|does} {A plus B|A and B|A + B} {make|equal|give|add up to|sum to|come to}?",
    "{if I|when I|when you|if you} {add|put together|sum} {A and B|A to B}, what {is it|comes out|do I get|is the result|do you get}?",
    "I have A THING and {get|buy|find|receive|am given|pick|take} B {more|others|more THING}. {how many|how many THING} {do I have|is that|are there|have I got|is that in all}{ now| in total| altogether|}?",
    "{NAME|my friend|a boy|a girl|she|he} has A THING and {gets|finds|buys|is given} B more{.|,} how many {is that|THING is that|does that make|are that}{ together| now|}?",
    "{there are|I see|we have} A THING {here|on the left|in one box} and B {there|on the right|in another box|in the other}, how many {in total|together|in all|THING altogether|are there}?",
    "the {sum|total} of A and B{ is what|?|}",
    "A more than B is {what|how much|how many}?",
    "{do you know|can you tell} what A {plus|and|+} B is?",
    "{result|answer} of A {plus|+} B",
    "{you|someone} {give|gives} me A THING and then B more, how many is that?",
)
_THINGS = ("apples", "cats", "books", "balls", "coins", "eggs", "cookies", "stones", "cars", "pens")
_NAMES = (
    *("Anna", "Ben", "Tom", "Lily", "Max", "Mia", "Sam", "Lucy", "Emma", "Jack", "Zoe", "Paul"),
    *("Maria", "Peter", "Clara", "Oscar", "Nina", "Leo", "Alice", "Bob", "Carol", "David", "Eve"),
    *(
        "Ahmed",
        "Yuki",
        "Ivan",
        "Chen",
        "Priya",
        "Omar",
        "Ingrid",
        "Felix",
        "Hannah",
        "Igor",
        "Julia",
    ),
)
_SAID = (
    *("hello", "hi", "banana", "this is a test", "good morning", "yes", "no", "I like cats", "OK"),
    *("the sky is blue", "one two three", "mlxrunner works", "a cup of tea", "ping", "abc", "done"),
    *("hello world", "it works", "the cat sat on the mat", "we are here", "test", "I am a robot"),
)


def make_counting_turn(rng: random.Random) -> Turn:
    """Counts stay within 0..COUNT_LIMIT and are at most LONGEST_COUNT numbers long."""
    low = rng.randint(0, COUNT_LIMIT - 2)
    high = rng.randint(low + 1, min(COUNT_LIMIT, low + rng.choice((6, 10, LONGEST_COUNT - 1))))
    kind = rng.random()
    if kind < 0.1:
        low, high = 41 + rng.randrange(60), 101 + rng.randrange(900)
        question = expand(rng.choice(_COUNT_FROM_ONE + _COUNT), rng, {})
        return _fill(
            question, low, high, rng
        ), f"That is too far for me. I count up to {COUNT_LIMIT}."
    templates, step = _COUNT, 1
    if kind < 0.25:
        low, high, templates = 1, rng.randint(2, LONGEST_COUNT), _COUNT_FROM_ONE
    elif kind < 0.38:
        templates, step = _COUNT_DOWN, -1
    elif kind < 0.5:
        low, high = 1, rng.randint(2, 20)
        templates, step = _COUNT_DOWN_TO_ONE, -1
    numbers = range(low, high + 1)[::step]
    question = expand(rng.choice(templates), rng, {})
    return _fill(question, low, high, rng), ", ".join(str(number) for number in numbers)


def make_addition_turn(rng: random.Random) -> Turn:
    """One sum, or a few at once, which is the same practice in fewer tokens. All numbers are within
    0..SUM_LIMIT."""
    if rng.random() < 0.35:
        return _make_long_addition_turn(rng)
    left, right = rng.randint(0, SUM_LIMIT), rng.randint(0, SUM_LIMIT)
    question = expand(rng.choice(_SUM), rng, {})
    question = question.replace("THING", rng.choice(_THINGS)).replace("NAME", rng.choice(_NAMES))
    return _fill(question, left, right, rng), _sum(left, right)


def _make_long_addition_turn(rng: random.Random) -> Turn:
    count = rng.randint(2, 6)
    pairs = [(rng.randint(0, SUM_LIMIT), rng.randint(0, SUM_LIMIT)) for _ in range(count)]
    sign = rng.choice(("+", " + ", " plus ", " and "))
    listed = rng.choice((", ", "; ", " and then ")).join(f"{a}{sign}{b}" for a, b in pairs)
    opening = rng.choice(("", "", "add ", "what is ", "sums: ", "calculate ", "add up "))
    return opening + listed, " ".join(_sum(left, right) for left, right in pairs)


def _sum(left: int, right: int) -> str:
    return f"{left} plus {right} is {left + right}."


def make_repeat_turn(rng: random.Random) -> Turn:
    said = (
        rng.choice(_SAID)
        if rng.random() < 0.5
        else " ".join(_made_up_phrase(rng) for _ in range(2))
    )
    question = expand(
        "{say|repeat|repeat after me:|please say|say the word|just say|write|reply with|answer with|"
        "say exactly|can you say|echo|respond with}",
        rng,
        {},
    )
    quote = rng.choice(("", "", '"', "'"))
    return f"{question} {quote}{said}{quote}", capitalize(said)


def make_name_turns(rng: random.Random) -> list[Turn]:
    """The user gives a name and may ask for it later, or asks without having given one."""
    name = rng.choice(_NAMES) if rng.random() < 0.4 else capitalize(_made_up_phrase(rng))
    ask = expand(
        "{what is my name|what's my name|do you remember my name|who am I|say my name|tell me my name|"
        "do you know my name|what am I called|which name did I tell you}?",
        rng,
        {},
    )
    if rng.random() < 0.15:
        return [(ask, "You have not told me your name.")]
    hello = expand(
        "{hello, |hi, |hi! |hey, |}{my name is|I am|I'm|call me|you can call me|this is|I am called} "
        "NAME{.|!||, nice to meet you|, how are you?}",
        rng,
        {},
    ).replace("NAME", name)
    return [(hello, f"Nice to meet you, {name}!"), (ask, f"Your name is {name}.")]


def _fill(question: str, low: int, high: int, rng: random.Random) -> str:
    """Replaces the capital letters A and B by numbers, sometimes spelt out."""
    spelt = rng.random() < 0.15 and max(low, high) < len(_WORDS)
    first, second = (_WORDS[low], _WORDS[high]) if spelt else (str(low), str(high))
    places = {"A": first, "B": second}
    return "".join(
        places.get(char, char) if not _inside_word(question, at) else char
        for at, char in enumerate(question)
    )


def _inside_word(text: str, at: int) -> bool:
    """Whether the letter at `at` is next to another letter."""
    return text[at - 1 : at].isalpha() or text[at + 1 : at + 2].isalpha()


def _made_up_phrase(rng: random.Random) -> str:
    """A pronounceable word that is in no list, so that copying must be learned."""
    parts = [
        rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))
    ]
    return "".join(parts) + rng.choice(("", *"nrslt"))
