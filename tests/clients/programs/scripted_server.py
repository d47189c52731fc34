"""A server whose engine writes scripted answers; tests run it as a module.

HTTP, the chat template, the tokenizer and the parsers are the real ones. Only the runner is a
scripted one: it decodes the prompt and answers with the text that the script has for it.

The environment names a folder: `script.json` is the script, and each prompt is written to it.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from app import cli, server
from app.core.images import ImagePixels, is_row_id
from app.core.jobs import (
    CallResult,
    Capacity,
    Ended,
    EndReason,
    EngineCall,
    EngineStats,
    Job,
    JobUpdate,
    Started,
    Token,
)
from app.core.model_files import ModelFiles
from app.core.ports import RunnerFailure, RunnerState, RunnerStatus
from app.core.requests import EmbedJob
from tests import tiny

FOLDER_VARIABLE = "TEST_SCRIPT_FOLDER"
CONTEXT = 1 << 17

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
# before each turn of the model
ASSISTANT = f"{TURN_START}assistant"

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Write each call as <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The same for a model that thinks: the template renders the reasoning of earlier turns, and ends
# the prompt with empty reasoning if the request turns it off.
THINKING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content or '' }}",
    """\
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}""",
).replace(
    "{%- if add_generation_prompt %}<|im_start|>assistant\n",
    """\
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}""",
)
THINKING_END = "</think>"


# The same for a model that reads images.
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SEEING_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string %}{{ content }}{% else %}{% for part in content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}
{%- endif %}{% endfor %}{% endif %}
{%- endmacro %}
""" + CHAT_TEMPLATE.replace("{{ message.content }}", "{{ show(message.content) }}")


def render_call(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the model writes it, and as the template renders it."""
    document = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{document}\n</tool_call>"


def render_answer(thought: str, *parts: str) -> str:
    """An answer after a thought. parts: text and calls."""
    return "\n".join([f"<think>\n{thought}\n{THINKING_END}\n", *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The answers of the engine after a user's message with this marker: one text for each turn of
    the model, and the last one for all later turns. The reasoning of an answer is omitted if the
    prompt turns it off."""

    marker: str
    answers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineScript:
    """tasks: the one whose marker is last in a prompt applies. needs_tools: whether it applies only
    to prompts with tools, because the program also asks for titles. default: for other prompts."""

    tasks: Sequence[Task]
    needs_tools: bool = True
    default: str = "Notes"

    def write(self, folder: Path) -> None:
        tasks = [{"marker": task.marker, "answers": list(task.answers)} for task in self.tasks]
        document = {"tasks": tasks, "needs_tools": self.needs_tools, "default": self.default}
        (folder / "script.json").write_text(json.dumps(document), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> "EngineScript":
        document = json.loads((folder / "script.json").read_text("utf-8"))
        return cls(**{**document, "tasks": [Task(**task) for task in document["tasks"]]})

    def find_answer(self, prompt: str) -> str:
        task = max(self.tasks, key=lambda task: prompt.rfind(task.marker))
        place = prompt.rfind(task.marker)
        if place < 0 or (self.needs_tools and "<tools>" not in prompt):
            return self.default
        # the last one is the turn that the engine writes now
        turn = prompt.count(ASSISTANT, place) - 1
        answer = task.answers[min(turn, len(task.answers) - 1)]
        if prompt.rstrip().endswith(THINKING_END):
            return answer.rpartition(THINKING_END)[2].lstrip()
        return answer


class ScriptedEngine:
    """Implements `Runner`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state: RunnerState = "loading"
        self._tokenizer: tokenizers.Tokenizer | None = None
        self._sees = False
        self._prompts = 0

    async def start(self, files: ModelFiles) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer_path))
        self._sees = bool(files.processor_config)
        self._state = "ready"

    @asynccontextmanager
    async def submit(self, job: Job) -> AsyncGenerator["ScriptedJob"]:
        assert self._tokenizer is not None
        image = self._tokenizer.token_to_id(IMAGE_TOKENS[1]) or 0  # without images
        ids = [image if is_row_id(id_) else id_ for id_ in job.prompt_token_ids]
        prompt = self._tokenizer.decode(ids, skip_special_tokens=False)
        self._prompts += 1
        (self._folder / f"prompt-{self._prompts:03}.txt").write_text(prompt, "utf-8")
        answer = EngineScript.read(self._folder).find_answer(prompt)
        ids = self._tokenizer.encode(answer, add_special_tokens=False).ids
        yield ScriptedJob(job, ids)

    async def embed(self, job: EmbedJob) -> Sequence[bytes]:
        raise AssertionError("the script has no embeddings")

    def status(self) -> RunnerStatus:
        capacity = Capacity(
            parallel=8,
            context_length=CONTEXT,
            kv_budget=1 << 30,
            kv_bytes_per_sequence=1,
            vision=self._sees,
        )
        return RunnerStatus(state=self._state, progress=100, stats=EngineStats(), capacity=capacity)

    async def call(self, call: EngineCall[CallResult]) -> CallResult:
        raise AssertionError(call)

    async def wait_for_failure(self) -> RunnerFailure:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("the engine never fails")

    async def stop(self) -> None:
        self._state = "failed"


class ScriptedJob:
    """Implements `Submission`."""

    def __init__(self, job: Job, ids: Sequence[int]) -> None:
        self._job = job
        self._ids = ids[: job.max_tokens]
        self._reason: EndReason = "length" if len(ids) > job.max_tokens else "stop"
        self.started_ns: int | None = None
        self.ended_ns: int | None = None

    def provide_images(self, images: Sequence[ImagePixels]) -> None:
        raise AssertionError("the engine requests no pixels")

    def limit_cached_tokens(self, tokens: int) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Sequence[JobUpdate]]:
        self.started_ns = time.monotonic_ns()
        yield [Started(job_id=self._job.id, cached_tokens=0, timestamp_ns=self.started_ns)]
        for id_ in self._ids:
            yield [Token(job_id=self._job.id, id=id_, timestamp_ns=time.monotonic_ns())]
        self.ended_ns = time.monotonic_ns()
        yield [Ended(job_id=self._job.id, reason=self._reason, timestamp_ns=self.ended_ns)]


def write_model(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Path:
    """A model folder whose template supports tools. Its weights are never loaded."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t) for t in (TURN_START, TURN_END)])
    size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id(TURN_END)
    tiny.write(folder, vocab_size=size, max_position_embeddings=CONTEXT, eos_token_id=end)
    tokenizer.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    config = {**json.loads(file.read_text()), "eos_token": TURN_END, "chat_template": chat_template}
    file.write_text(json.dumps(config))
    return folder


def write_seeing_model(folder: Path) -> Path:
    """A model folder with the config of a Qwen3-VL. Its weights are never loaded."""
    write_model(folder, SEEING_TEMPLATE)
    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([tokenizers.AddedToken(text) for text in IMAGE_TOKENS])
    tokenizer.save(str(file))
    file = folder / "config.json"
    text = {**json.loads(file.read_text()), "vocab_size": tokenizer.get_vocab_size()}
    text |= {"model_type": "qwen3_vl_text", "head_dim": 4}
    vision = {"model_type": "qwen3_vl_vision", "depth": 1, "hidden_size": 16, "num_heads": 2}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    file.write_text(json.dumps({**config, "eos_token_id": text["eos_token_id"]}))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def main() -> int:
    folder = Path(os.environ[FOLDER_VARIABLE])

    def get_factory(settings: object, spawn: object) -> object:
        return lambda settings: ScriptedEngine(folder)

    setattr(server, "_get_runner_factory", get_factory)  # noqa: B010  # a private name
    # no process for a model, which would be spawned before the server asks for its runner
    return cli.main([*sys.argv[1:], "--runner", "thread"])


if __name__ == "__main__":
    sys.exit(main())
