"""A session of a coding agent over HTTP, with real chat templates: nothing is lost, all counts
agree, and the prefix cache serves what two prompts have in common.

The maximum that the cache may serve is computed here, from the prompts that the engine received.
"""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from app.api.anthropic.request import parse_messages_request
from app.core.ports import ModelCard
from app.core.requests import Conversation
from tests.conftest import SHARED
from tests.serving.agent_session import (
    NUM_TOOLS,
    TOOLS,
    AgentConversation,
    Answered,
    run_session,
)
from tests.serving.in_process import serve_model
from tests.serving.session_engine import CONTEXT, KINDS, SessionEngine, write_model
from tests.serving.session_output import OutputFinder, TurnOutput
from tests.text.families.rows import parse_tools, template, templates
from tests.text.templates import MADE_FOR_OTHER_CONVERSATIONS, make_prompt_builder

NAMES = (
    sorted(set(templates(SHARED)) - set(MADE_FOR_OTHER_CONVERSATIONS)) if SHARED.is_dir() else []
)

# one template for each way to treat messages between results and answers
FEW = (
    "Qwen-Qwen3-0.6B.jinja",
    "Qwen3.5-4B.jinja",
    "GLM-4.6.jinja",
    "openai-gpt-oss-120b.jinja",
    "mistralai-Mistral-Nemo-Instruct-2407.jinja",
    "google-gemma-2-2b-it.jinja",
)

REQUESTS, FEW_REQUESTS = 50, 10

SHARE = 0.99

# characters of the longest markup between the last word of a message and its end
MARKUP = 80


def find_output(source: str) -> TurnOutput:
    functions = [
        {
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["input_schema"],
            }
        }
        for tool in TOOLS
    ]
    return OutputFinder(source, parse_tools(functions)).find()


def run(folder: Path, source: str, turns: int) -> list[AgentConversation]:
    output = find_output(source)
    model = write_model(folder, source, output.ends)

    async def drive() -> list[AgentConversation]:
        engine = SessionEngine()
        async with serve_model(model, lambda _: engine) as app:
            conversations = await run_session(app, engine, model.name, output, turns)
        assert engine.max_running == 2, "no requests ran at the same time"
        return conversations

    return asyncio.run(drive())


def check_session(source: str, conversations: list[AgentConversation], turns: int) -> None:
    main, title, *agents = conversations
    assert len(main.tools) == NUM_TOOLS
    assert [len(one.answered) for one in (main, title)] == [turns, 1]
    assert [len(one.answered) for one in agents] == [3, 3]
    for conversation in conversations:
        for answered in conversation.answered:
            check_counts(answered)
            text = answered.prompt.text
            assert [word for word in answered.words if word not in text] == []
        check_reuse(conversation)
    check_reasoning(source, main)


def check_counts(answered: Answered) -> None:
    """The counts of the response, of count_tokens and of the engine are the same."""
    prompt = answered.prompt
    assert answered.counted == len(prompt.ids)
    for usage in (answered.first_usage, answered.usage):
        assert usage["cache_read_input_tokens"] == prompt.reported
        assert (
            usage["input_tokens"]
            + usage["cache_creation_input_tokens"]
            + usage["cache_read_input_tokens"]
        ) == len(prompt.ids)


def check_reuse(conversation: AgentConversation) -> None:
    for before, now in pairwise(conversation.answered):
        old, new = before.prompt.text, now.prompt.text
        common = common_length(old, new)
        last_end = find_last_end(new, common, before)
        for kinds in KINDS:
            possible = common if set(kinds) == {"k"} else last_end
            assert now.prompt.cached[kinds] >= SHARE * possible, (
                kinds,
                common,
                last_end,
                new[last_end - 99 : common + 99],
            )


def common_length(old: str, new: str) -> int:
    # the last id of a prompt is always computed
    pairs = zip(old, new[:-1], strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(old), len(new) - 1))


def find_last_end(text: str, common: int, before: Answered) -> int:
    """The position after the last word of the last message that ends within the common prefix.
    Text next to results counts as one message with them, because it may be folded."""
    ends = (text.find(word) + len(word) for word in before.ends if word in text)
    return max((end for end in ends if end + MARKUP <= common), default=0)


def check_reasoning(source: str, main: AgentConversation) -> None:
    """The prompt contains every thought of the running loop that the template renders when no text
    is next to the results."""
    builder = make_prompt_builder(source)
    card = ModelCard(id="tiny", created=0, context_length=CONTEXT)
    for answered in main.answered:
        if not (answered.in_loop and answered.thoughts):
            continue
        request = parse_messages_request(
            json.dumps({**answered.body, "model": "tiny"}).encode(), card
        ).request
        assert isinstance(request.prompt, Conversation)
        messages = [
            message
            for number, message in enumerate(request.prompt.messages)
            if number == 0
            or message.role not in ("system", "user")
            or "QUESTION" in (message.content or "")
        ]
        bare = builder.build(request, replace(request.prompt, messages=tuple(messages))).text
        kept = [word for word in answered.thoughts if word in bare]
        assert [word for word in kept if word not in answered.prompt.text] == []


@pytest.mark.parametrize("name", FEW)
def test_a_short_session_is_served_from_the_prefix_cache(
    shared: Path, tmp_path: Path, name: str
) -> None:
    source = template(shared, name)
    check_session(source, run(tmp_path / "model", source, FEW_REQUESTS), FEW_REQUESTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_served_from_the_prefix_cache(shared: Path, tmp_path: Path, name: str) -> None:
    source = template(shared, name)
    check_session(source, run(tmp_path / "model", source, REQUESTS), REQUESTS)
