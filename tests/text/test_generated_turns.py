"""The model's output is rendered again exactly as it was generated."""

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.events import ReasoningDelta, TextDelta, ToolCallDelta
from app.core.jobs import Token
from app.core.model_files import ModelFiles
from app.core.requests import Conversation, GenerateRequest, Message, ToolCall
from app.text.generated_turns import (
    GeneratedTurn,
    GeneratedTurns,
    TurnParts,
    TurnRecorder,
    normalize_json,
)
from app.text.output import ChoiceOutputProcessor, Delta, OutputOptions
from app.text.prompt import PromptBuilder, RenderedPrompt
from app.text.tokenizer import Tokenizer
from tests import tiny
from tests.text.families.rows import template
from tests.text.templates import SYSTEM, USER, WEATHER

TOKENIZER = Tokenizer(tiny.tokenizer())
END = "<|im_end|>"


class Model:
    """Prompts of one model, and outputs that we write for it."""

    def __init__(self, source: str, *, end: str = END) -> None:
        nowhere = Path("/nowhere")
        files = ModelFiles(
            name="made",
            path=nowhere,
            config={},
            shards=(),
            tokenizer_path=nowhere / "tokenizer.json",
            tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
            generation_config={},
            chat_template=source,
            created=0,
        )
        self.turns = GeneratedTurns()
        self._builder = PromptBuilder(files, TOKENIZER, self.turns, [end])

    def prompt(self, *messages: Message, caller: str = "") -> RenderedPrompt:
        request = GenerateRequest(model="made", prompt="", tools=(WEATHER,), caller=caller)
        conversation = Conversation(messages=messages)
        return self._builder.build(request, conversation, needs_message_ends=True)

    def generate(self, prompt: RenderedPrompt, text: str, *, caller: str = "") -> Message:
        """Answers a prompt with this text; returns the message that the client gets."""
        ids = tuple(TOKENIZER.encode(prompt.text, add_special_tokens=False))
        answer = ChoiceOutputProcessor(
            TOKENIZER,
            choice=0,
            prompt_ids=ids,
            options=OutputOptions(),
            parser=prompt.build_parser(),
        )
        recorder = TurnRecorder(
            self.turns,
            caller,
            prompt_length=len(prompt.text),
            prompt_digest=prompt.digest,
            context_ids=ids,
        )
        found: list[Delta] = []
        for id in TOKENIZER.encode(text, add_special_tokens=False):
            deltas = answer.feed(Token(job_id="a", id=id, timestamp_ns=0))
            recorder.feed(id, deltas)
            found += deltas
        recorder.finish(last := answer.flush())
        return to_message([*found, *last])


def to_message(deltas: list[Delta]) -> Message:
    """The message as a client puts it together from a stream."""
    content = reasoning = ""
    calls: list[ToolCall] = []
    for delta in deltas:
        match delta:
            case TextDelta(text=text):
                content += text
            case ToolCallDelta(id=str(id), name=str(name), arguments=arguments):
                calls.append(ToolCall(id=id, name=name, arguments=arguments))
            case ToolCallDelta(arguments=arguments):
                last = calls.pop()
                calls.append(replace(last, arguments=last.arguments + arguments))
            case ReasoningDelta(text=text):
                reasoning += text
    return Message(
        role="assistant",
        content=content or None,
        reasoning=reasoning or None,
        tool_calls=tuple(calls),
    )


def result(call: Message, text: str = "Sunny.") -> Message:
    return Message(role="tool", content=text, tool_call_id=call.tool_calls[0].id)


def rewritten(message: Message, arguments: str) -> Message:
    """The same call with arguments that the client wrote again."""
    return replace(message, tool_calls=(replace(message.tool_calls[0], arguments=arguments),))


# how a model writes calls, and how its template does
QWEN_CALL = (
    '<tool_call>\n{"arguments":{"city":"Oslo",  "n":1.50},"name":"get_weather"}\n</tool_call>'
)
CODER_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=n>\n[1,2]\n</parameter>\n</function>\n</tool_call>"
)
QWEN_THOUGHT = "<think>\n  Oslo, then.\n\n</think>\n\n\nI look.\n"


@pytest.mark.parametrize(
    ("name", "output", "arguments", "end"),
    [
        ("Qwen-Qwen3-0.6B.jinja", QWEN_CALL, '{"n": 1.5, "city": "\\u004fslo"}', END),
        ("Qwen-Qwen3-0.6B.jinja", QWEN_THOUGHT + QWEN_CALL, '{"city":"Oslo","n":1.5}', END),
        ("Qwen3-Coder.jinja", "Look:\n\n" + CODER_CALL, '{"n":[1,2],"city":"Oslo"}', END),
        (
            "meta-llama-Llama-3.1-8B-Instruct.jinja",
            '{"name": "get_weather", "parameters": {"city":"Oslo"}}',
            '{"city": "Oslo"}',
            "<|eot_id|>",
        ),
        (
            "openai-gpt-oss-120b.jinja",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}',
            '{ "city": "Oslo" }',
            "<|call|>",
        ),
    ],
    ids=["calls", "thoughts", "parameters", "llama", "harmony"],
)
def test_a_call_is_rendered_as_it_was_generated(
    shared: Path, name: str, output: str, arguments: str, end: str
) -> None:
    model = Model(template(shared, name), end=end)
    prompt = model.prompt(SYSTEM, USER)
    call = model.generate(prompt, output)
    assert call.tool_calls
    call = rewritten(call, arguments)
    later = model.prompt(SYSTEM, USER, call, result(call)).text
    assert later.startswith(prompt.text + output + end)
    other = Model(template(shared, name), end=end).prompt(SYSTEM, USER, call, result(call)).text
    assert not other.startswith(prompt.text + output + end)


def test_several_turns_are_restored_one_after_the_other(shared: Path) -> None:
    model = Model(template(shared, "Qwen-Qwen3-0.6B.jinja"))
    messages = [USER]
    for n in range(4):
        prompt = model.prompt(*messages)
        output = (
            f'<tool_call>\n{{"name":"get_weather","arguments":{{"city":"Oslo{n}"}}}}\n</tool_call>'
        )
        call = model.generate(prompt, output)
        messages += [call, result(call, f"Sunny {n}.")]
        assert model.prompt(*messages).text.startswith(prompt.text + output + END)


def test_the_same_call_twice_is_restored_twice(shared: Path) -> None:
    model = Model(template(shared, "Qwen-Qwen3-0.6B.jinja"))
    messages = [USER]
    for _ in range(3):
        call = model.generate(model.prompt(*messages), QWEN_CALL)
        messages += [call, result(call)]
    assert model.prompt(*messages).text.count(QWEN_CALL) == 3


def test_white_space_that_the_template_trims_is_restored() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    model = Model(source)
    prompt = model.prompt(USER)
    answer = model.generate(prompt, "\n Seven degrees. \n")
    later = model.prompt(USER, answer, USER).text
    assert later.startswith(prompt.text + "\n Seven degrees. \n" + END)


@pytest.mark.parametrize(
    "arguments", ['{"city": "Rome", "n": 1.5}', '{"city": "Oslo", "n": true}', '{"city": "Oslo"}']
)
def test_a_call_that_the_client_changed_is_rendered_as_it_was_sent(
    shared: Path, arguments: str
) -> None:
    model = Model(template(shared, "Qwen-Qwen3-0.6B.jinja"))
    call = rewritten(model.generate(model.prompt(USER), QWEN_CALL), arguments)
    later = model.prompt(USER, call, result(call)).text
    assert QWEN_CALL not in later
    assert arguments in later


def test_another_prompt_and_another_caller_get_nothing_restored(shared: Path) -> None:
    model = Model(template(shared, "Qwen-Qwen3-0.6B.jinja"))
    call = model.generate(model.prompt(USER, caller="one"), QWEN_CALL, caller="one")
    history = (USER, call, result(call))
    assert QWEN_CALL in model.prompt(*history, caller="one").text
    assert QWEN_CALL not in model.prompt(*history, caller="two").text
    assert QWEN_CALL not in model.prompt(SYSTEM, *history, caller="one").text


def test_a_turn_without_its_reasoning_is_rendered_as_it_was_sent(shared: Path) -> None:
    model = Model(template(shared, "Qwen-Qwen3-0.6B.jinja"))
    call = model.generate(model.prompt(USER), QWEN_THOUGHT + QWEN_CALL)
    call = replace(call, reasoning=None)
    assert "Oslo, then." not in model.prompt(USER, call, result(call)).text


def turn(length: int) -> GeneratedTurn:
    return GeneratedTurn(
        prompt_length=length, prompt_digest=b"", token_ids=array("I", range(100)), context_ids=()
    )


def make_turn(text: str) -> Message:
    return Message(role="assistant", content=text)


def test_memory_is_bounded_and_the_caller_with_the_most_bytes_loses_turns() -> None:
    turns = GeneratedTurns(max_bytes=10 * turn(0).nbytes)
    turns.add("quiet", TurnParts(content="hello", calls=()), turn(1))
    for n in range(1000):
        turns.add("loud", TurnParts(content=f"text {n}", calls=()), turn(n))
        if n % 10 == 0:
            turns.find("loud", [])
        assert turns.nbytes <= 10 * turn(0).nbytes
    assert turns.find("quiet", [make_turn("hello")]) == [turn(1)]
    assert turns.find("loud", [make_turn("text 3")]) == []
    assert turns.find("loud", [make_turn("text 999")]) == [turn(999)]
    assert turns.nbytes > 0


def test_one_text_for_many_prompts_keeps_the_latest() -> None:
    turns = GeneratedTurns()
    for n in range(100):
        turns.add("", TurnParts(content="ok", calls=()), turn(n))
    assert [found.prompt_length for found in turns.find("", [make_turn(" ok\n")])] == [
        *range(84, 100)
    ]


def test_json_that_means_the_same_is_one_text() -> None:
    assert normalize_json('{"b":1,"a":"\\u00e9"}') == normalize_json('{ "a": "é", "b": 1 }')
    assert normalize_json("") == normalize_json("{}")
    assert normalize_json("1") != normalize_json("true")
    assert normalize_json("{oops") == "{oops"
    assert normalize_json("[" * 100_000) == "[" * 100_000
