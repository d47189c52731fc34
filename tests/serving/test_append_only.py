"""An agent's session over real templates: how much of each prompt the prefix cache serves."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.core.requests import Message
from app.engine.prefix.cache import common_prefix_length
from tests.engine.prefix.harness import begin, feed, prefill
from tests.engine.prefix.radix_content import cache_of
from tests.text.families.rows import template
from tests.text.templates import TOKENIZER
from tests.text.test_generated_turns import END, Model, result, rewritten

JSON_CALL = '<tool_call>\n{"name":"get_weather","arguments":{"city":"Oslo N"}}\n</tool_call>'
TAGGED_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo N\n</parameter>\n</function>\n"
    "</tool_call>"
)
# what each model generates; where the prompt opens the reasoning, the output continues it
OUTPUTS = {
    "Qwen-Qwen2.5-7B-Instruct.jinja": "I look.\n" + JSON_CALL,
    "Qwen-Qwen3-0.6B.jinja": "<think>\nThought N.\n</think>\n\n" + JSON_CALL,
    "Qwen3-Coder.jinja": "I look.\n" + TAGGED_CALL,
    "Qwen3.5-4B.jinja": "Thought N.\n</think>\n\n" + TAGGED_CALL,
}
TURNS, ROUNDS = 3, 4

# ids by which a checkpoint may be before the end of a message: half a marker of the byte tokenizer
NEAR = 16


class Session:
    """A session of one model whose layers are of these kinds; see `FakeLayer`."""

    def __init__(self, source: str, kinds: str) -> None:
        self.model = Model(source)
        self.cache = cache_of(kinds)
        self.computed: tuple[int, ...] = ()  # of the last turn: prompt, output and its end
        self.messages = [Message(role="system", content="Answer briefly. " * 20)]

    def ask(self, output: str) -> tuple[Message, int, int, int]:
        """Runs one request; returns the client's message, the number of cached ids, those that are
        the same as in the turn before, and those up to the last message end among these."""
        prompt = self.model.prompt(*self.messages)
        ids, ends = TOKENIZER.encode_with_positions(
            prompt.text, prompt.message_ends, add_special_tokens=False
        )
        same = common_prefix_length(tuple(ids[:-1]), self.computed)
        end_of_message = prompt.text[:same].rfind(END) + len(END)
        lease = begin(self.cache, ids, turn_ends=sorted(set(ends)))
        cached = lease.cached
        prefill(lease, ids)
        sampled = TOKENIZER.encode(output + END, add_special_tokens=False)
        feed(lease, sampled)
        self.computed = (*ids, *sampled)
        lease.commit(self.computed, keep=len(self.computed))
        return self.model.generate(prompt, output), cached, same, end_of_message

    def run(self, output: str) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        for turn in range(TURNS):
            self.messages.append(Message(role="user", content=f"Question {turn}. " * 9))
            for number in range(ROUNDS):
                said = output.replace("N", str(number))
                call, *counts = self.ask(said)
                found.append((counts[0], counts[1], counts[2]))
                call = rewritten(call, f'{{ "city" : "Oslo {number}" }}')
                self.messages += [
                    call,
                    result(call, f"Sunny {number}. " * 9),
                    Message(role="user", content=f"Reminder {number}."),
                    Message(role="system", content=f"{number} tokens left"),
                ]
            thinks = "</think>" in output
            before = output[: output.index("</think>") + len("</think>\n\n")] if thinks else ""
            answer, *counts = self.ask(before.replace("N", "9") + "It is sunny.")
            found.append((counts[0], counts[1], counts[2]))
            self.messages.append(answer)
        return found


@pytest.mark.parametrize("name", OUTPUTS)
def test_full_attention_reuses_all_that_two_prompts_have_in_common(shared: Path, name: str) -> None:
    counts = Session(template(shared, name), "kk").run(OUTPUTS[name])
    assert all(cached == same for cached, same, _ in counts[1:])


@pytest.mark.parametrize("kinds", ["kr", "wk"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_other_layers_resume_at_the_last_message_end_in_common(
    shared: Path, name: str, kinds: str
) -> None:
    counts = Session(template(shared, name), kinds).run(OUTPUTS[name])
    late = [(c, same, end) for c, same, end in counts[1:] if c < min(same, end) - NEAR]
    assert late == []


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_loop_is_never_computed_twice(shared: Path, name: str) -> None:
    """Within a tool loop, the whole output of the turn before is served: it has the same bytes."""
    session = Session(template(shared, name), "kr")
    session.messages.append(Message(role="user", content="Question."))
    for number in range(ROUNDS):
        computed = len(session.computed)
        said = OUTPUTS[name].replace("N", str(number))
        call, cached, *_ = session.ask(said)
        assert cached == computed
        call = rewritten(call, f'{{ "city" : "Oslo {number}" }}')
        session.messages += [call, replace(result(call), is_error=True)]
