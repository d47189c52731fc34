"""Which template a model brings, and what its conversations become."""

from datetime import datetime

import pytest
import tokenizers
from tokenizers import processors

from app.core.errors import AppError, ErrorKind
from app.core.requests import Message, ToolCall
from app.text.chat_template import ChatTemplate, build_tokenizer_info
from app.text.tokenizer import Tokenizer
from tests import tiny

HELLO = (Message(role="user", content="Hello"),)
ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def shown(files, source: str, messages: tuple[Message, ...] = HELLO, **options) -> str:
    return ChatTemplate(files(chat_template=source)).render(messages, **options)


class TestWhichTemplate:
    def test_a_file_of_its_own_wins_over_the_config(self, files):
        model = files(chat_template="file", tokenizer_config={"chat_template": "config"})
        assert ChatTemplate(model).render(HELLO) == "file"
        assert ChatTemplate(model).includes_special_tokens

    def test_else_it_stands_in_the_config(self, files):
        model = files(tokenizer_config={"chat_template": "config"})
        assert ChatTemplate(model).render(HELLO) == "config"

    def test_of_several_tool_use_is_for_tools(self, files):
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools[0].name }}"},
        ]
        chat = ChatTemplate(files(tokenizer_config={"chat_template": named}))
        assert chat.render(HELLO) == "plain"
        assert chat.render(HELLO, tools=[{"name": "add"}]) == "add"

    def test_the_only_one_is_for_tools_too(self, files):
        assert shown(files, "{{ tools | length }}", tools=[{}, {}]) == "2"

    @pytest.mark.parametrize(
        "given",
        [[], [{"name": "rag", "template": "x"}], [{"name": "default"}], ["x"], 7, {"default": "x"}],
    )
    def test_anything_else_is_a_mistake_in_the_files(self, files, given):
        with pytest.raises(AppError, match=r"chat_template in tokenizer_config\.json") as caught:
            ChatTemplate(files(tokenizer_config={"chat_template": given}))
        assert caught.value.kind is ErrorKind.MODEL_FILES

    def test_a_model_without_one_continues_what_was_said(self, files):
        chat = ChatTemplate(files())
        assert chat.render((Message(role="user", content="Once upon"),)) == "Once upon"
        turns = (Message(role="user", content="One."), Message(role="assistant", content="Two."))
        assert chat.render(turns) == "One.\nTwo."
        assert not chat.includes_special_tokens

    def test_a_real_base_model_is_asked_as_by_a_plain_prompt(self, real_files):
        model = real_files("models/stories260K")
        chat, tokenizer = ChatTemplate(model), Tokenizer.load(model)
        text = chat.render((Message(role="user", content="Once upon a time"),))
        ids = tokenizer.encode(text, add_special_tokens=not chat.includes_special_tokens)
        assert ids == tokenizer.encode("Once upon a time", add_special_tokens=True)

    def test_a_real_one_out_of_a_real_config(self, real_files):
        chat = ChatTemplate(real_files("tokenizers/qwen3"))
        assert chat.render(HELLO) == ("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
        assert chat.render(HELLO, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
        assert chat.render(HELLO, add_generation_prompt=False).endswith("Hello<|im_end|>\n")


class TestWhatTemplatesAreGiven:
    def test_the_models_special_tokens_as_far_as_it_has_them(self, files):
        config = {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "special": True},
            "pad_token": None,
            "additional_special_tokens": ["<a>", {"content": "<b>"}],
        }
        source = (
            "{{ bos_token }}{{ eos_token }}{{ additional_special_tokens | join }}"
            "{{ pad_token is defined }}{{ unk_token is defined }}"
        )
        chat = ChatTemplate(files(chat_template=source, tokenizer_config=config))
        assert chat.render(HELLO) == "<s></s><a><b>FalseFalse"

    def test_the_clock_that_was_handed_in(self, files):
        model = files(chat_template="{{ strftime_now('%d %B %Y') }}")
        chat = ChatTemplate(model, now=lambda: datetime(2025, 7, 10, 12))
        assert chat.render(HELLO) == "10 July 2025"
        assert str(datetime.now().year) in ChatTemplate(model).render(HELLO)

    def test_documents_and_any_option(self, files):
        source = "{{ documents[0].title }}{{ enable_thinking }}{{ add_generation_prompt }}"
        assert shown(files, source, documents=[{"title": "T"}], enable_thinking=3) == "T3True"
        assert shown(files, source.replace("[0]", ""), add_generation_prompt=False) == "False"

    def test_no_content_is_empty_content(self, files):
        assert shown(files, ROLES, (Message(role="assistant", content=None),)) == "[assistant]"

    def test_a_developer_is_a_system_to_templates_that_know_no_developer(self, files):
        said = (Message(role="developer", content="Be brief."),)
        assert shown(files, ROLES, said) == "[system]Be brief."
        knowing = ROLES + "{# developer #}"
        assert shown(files, knowing, said) == "[developer]Be brief."

    def test_names_and_tool_calls(self, files):
        said = (
            Message(
                role="assistant",
                content=None,
                tool_calls=(
                    ToolCall(id="c1", name="add", arguments='{"a": [1, "é"]}'),
                    ToolCall(id="c2", name="now", arguments=" "),
                ),
            ),
            Message(role="tool", content="3", name="add", tool_call_id="c1"),
        )
        assert shown(files, "{{ messages | tojson }}", said) == (
            '[{"role": "assistant", "content": "", "tool_calls": ['
            '{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '
            '{"a": [1, "é"]}}}, '
            '{"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}}]}, '
            '{"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"}]'
        )

    @pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "3", "[" * 100_000])
    def test_arguments_that_are_no_object_are_named(self, files, arguments):
        call = ToolCall(id="c", name="f", arguments=arguments)
        said = (*HELLO, Message(role="assistant", content="", tool_calls=(call,)))
        with pytest.raises(AppError) as caught:
            shown(files, ROLES, said)
        assert caught.value.kind is ErrorKind.INVALID
        assert caught.value.param == "messages.1.tool_calls.0.function.arguments"
        assert caught.value.param in caught.value.message


def test_a_refusal_is_the_clients_and_in_the_templates_words(files):
    with pytest.raises(AppError, match="roles must alternate") as caught:
        shown(files, "{{ raise_exception('roles must alternate') }}")
    assert caught.value.message == "roles must alternate"
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")


class TestBeginningOfText:
    """A conversation's text begins as its template says, and with no token that begins a text
    twice."""

    TURNS = (
        Message(role="user", content="Hello"),
        Message(role="assistant", content="Hi."),
        Message(role="user", content="Bye"),
    )

    def ids(self, model, messages=TURNS) -> tuple[Tokenizer, list[int]]:
        chat, tokenizer = ChatTemplate(model), Tokenizer.load(model)
        return tokenizer, list(
            tokenizer.encode(
                chat.render(messages), add_special_tokens=not chat.includes_special_tokens
            )
        )

    @pytest.mark.parametrize(
        ("folder", "begins"),
        [("mistral-v3", True), ("phi-3", True), ("qwen3", False), ("gpt2", False)],
    )
    def test_of_real_models_with_their_own_templates(self, real_files, folder, begins):
        model = real_files(f"tokenizers/{folder}")
        tokenizer, ids = self.ids(model)
        begin = tokenizer.bos_token_id
        assert ((ids[0] == begin), sum(id == begin for id in ids)) == (begins, begins)

    @pytest.mark.parametrize(
        ("template", "bos"),
        [
            ("google-gemma-2-2b-it", "<bos>"),
            ("ortx-gemma-3", "<bos>"),
            ("meta-llama-Llama-3.1-8B-Instruct", "<|begin_of_text|>"),
            ("meta-llama-Llama-3.3-70B-Instruct", "<|begin_of_text|>"),
            ("mistralai-Mistral-Nemo-Instruct-2407", "<s>"),
        ],
    )
    @pytest.mark.parametrize("add_bos", [None, True, False])
    def test_of_templates_that_write_it(self, shared, files, made, template, bos, add_bos):
        """Whatever the tokenizer does to plain texts: Gemma's and Llama's begin them, too."""
        inner = tokenizers.Tokenizer.from_str(made["byte_level"].to_str())
        begin = inner.get_vocab_size()
        inner.add_special_tokens([bos])
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, begin)]
        )
        source = (shared / f"chat_templates/templates/{template}.jinja").read_text()
        config = {"bos_token": bos, "eos_token": "<end>", "add_bos_token": add_bos}
        model = files(inner, chat_template=source, tokenizer_config=config)
        tokenizer, ids = self.ids(model)
        assert (ids[0], ids.count(begin)) == (begin, 1)
        assert (tokenizer.encode("Hello", add_special_tokens=True)[0] == begin) is (
            add_bos is not False
        )

    def test_what_a_user_writes_is_not_the_beginning(self, files, made):
        source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        config = {"bos_token": "<s>", "add_bos_token": True}
        model = files(made["sentence_piece"], chat_template=source, tokenizer_config=config)
        said = (Message(role="user", content="<s>the"),)
        assert self.ids(model, said)[1][:2] == [1, 1], "both are there, as both were written"
        plain = files(made["sentence_piece"], tokenizer_config=config)
        assert self.ids(plain, said)[1].count(1) == 1


def test_a_tokenizer_is_described_by_its_special_tokens_and_its_template(files):
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "name_or_path": "author/models",
    }
    made = files(tiny.tokenizer(), tokenizer_config=config, chat_template="{{ messages }}")
    assert build_tokenizer_info(made, Tokenizer.load(made), context=64) == {
        "tokenizer_class": "LlamaTokenizer",
        "model_max_length": 64,
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": None,
        "pad_token": None,
        "chat_template": "{{ messages }}",
    }


def test_special_tokens_that_only_config_json_names_are_there_too(files):
    config = {"eos_token_id": tiny.END, "bos_token_id": tiny.BOS}
    made = files(tiny.tokenizer(), config=config)
    info = build_tokenizer_info(made, Tokenizer.load(made), context=64)
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert info["chat_template"] is None
    bare = files(tiny.tokenizer())
    info = build_tokenizer_info(bare, Tokenizer.load(bare), context=64)
    assert (info["bos_token"], info["eos_token"]) == (None, None)
