"""Selection of the chat template of a model, and rendering of conversations."""

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


def render(files, source: str, messages: tuple[Message, ...] = HELLO, **options) -> str:
    return ChatTemplate(files(chat_template=source)).render(messages, **options)


class TestTemplateSelection:
    def test_a_template_file_overrides_the_config(self, files):
        model = files(chat_template="file", tokenizer_config={"chat_template": "config"})
        assert ChatTemplate(model).render(HELLO) == "file"
        assert ChatTemplate(model).includes_special_tokens

    def test_the_config_may_contain_the_template(self, files):
        model = files(tokenizer_config={"chat_template": "config"})
        assert ChatTemplate(model).render(HELLO) == "config"

    def test_the_template_named_tool_use_is_used_with_tools(self, files):
        templates = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools[0].name }}"},
        ]
        chat = ChatTemplate(files(tokenizer_config={"chat_template": templates}))
        assert chat.render(HELLO) == "plain"
        assert chat.render(HELLO, tools=[{"name": "add"}]) == "add"

    def test_a_single_template_is_used_with_tools_too(self, files):
        assert render(files, "{{ tools | length }}", tools=[{}, {}]) == "2"

    @pytest.mark.parametrize(
        "value",
        [[], [{"name": "rag", "template": "x"}], [{"name": "default"}], ["x"], 7, {"default": "x"}],
    )
    def test_any_other_value_is_a_model_files_error(self, files, value):
        with pytest.raises(AppError, match=r"chat_template in tokenizer_config\.json") as caught:
            ChatTemplate(files(tokenizer_config={"chat_template": value}))
        assert caught.value.kind is ErrorKind.MODEL_FILES

    def test_without_a_template_the_messages_are_joined(self, files):
        chat = ChatTemplate(files())
        assert chat.render((Message(role="user", content="Once upon"),)) == "Once upon"
        turns = (Message(role="user", content="One."), Message(role="assistant", content="Two."))
        assert chat.render(turns) == "One.\nTwo."
        assert not chat.includes_special_tokens

    def test_a_real_base_model_gets_a_plain_prompt(self, real_files):
        model = real_files("models/stories260K")
        chat, tokenizer = ChatTemplate(model), Tokenizer.load(model)
        text = chat.render((Message(role="user", content="Once upon a time"),))
        ids = tokenizer.encode(text, add_special_tokens=not chat.includes_special_tokens)
        assert ids == tokenizer.encode("Once upon a time", add_special_tokens=True)

    def test_a_real_template_of_a_real_config_is_rendered(self, real_files):
        chat = ChatTemplate(real_files("tokenizers/qwen3"))
        assert chat.render(HELLO) == ("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
        assert chat.render(HELLO, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
        assert chat.render(HELLO, add_generation_prompt=False).endswith("Hello<|im_end|>\n")


class TestTemplateContext:
    def test_the_special_tokens_of_the_model_are_defined(self, files):
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

    def test_the_clock_can_be_injected(self, files):
        model = files(chat_template="{{ strftime_now('%d %B %Y') }}")
        chat = ChatTemplate(model, now=lambda: datetime(2025, 7, 10, 12))
        assert chat.render(HELLO) == "10 July 2025"
        assert str(datetime.now().year) in ChatTemplate(model).render(HELLO)

    def test_llama_3_gets_todays_date(self, files):
        """Its template has a default date, in case none is given."""
        source = (
            "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
        )
        model = files(chat_template=source + "{{ date_string }}")
        chat = ChatTemplate(model, now=lambda: datetime(2026, 11, 28))
        assert chat.render(HELLO) == "28 Nov 2026"
        assert chat.render(HELLO, date_string="1 May 2020") == "1 May 2020"

    def test_documents_and_options_are_defined(self, files):
        source = "{{ documents[0].title }}{{ enable_thinking }}{{ add_generation_prompt }}"
        assert render(files, source, documents=[{"title": "T"}], enable_thinking=3) == "T3True"
        assert render(files, source.replace("[0]", ""), add_generation_prompt=False) == "False"

    def test_no_content_is_empty_content(self, files):
        assert render(files, ROLES, (Message(role="assistant", content=None),)) == "[assistant]"

    def test_the_developer_role_becomes_system_where_it_is_unsupported(self, files):
        messages = (Message(role="developer", content="Be brief."),)
        assert render(files, ROLES, messages) == "[system]Be brief."
        source = ROLES + "{# developer #}"
        assert render(files, source, messages) == "[developer]Be brief."

    def test_names_and_tool_calls_are_defined(self, files):
        messages = (
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
        assert render(files, "{{ messages | tojson }}", messages) == (
            '[{"role": "assistant", "content": "", "tool_calls": ['
            '{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '
            '{"a": [1, "é"]}}}, '
            '{"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}}]}, '
            '{"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"}]'
        )

    @pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "3", "[" * 100_000])
    def test_arguments_that_are_not_an_object_are_named(self, files, arguments):
        call = ToolCall(id="c", name="f", arguments=arguments)
        messages = (*HELLO, Message(role="assistant", content="", tool_calls=(call,)))
        with pytest.raises(AppError) as caught:
            render(files, ROLES, messages)
        assert caught.value.kind is ErrorKind.INVALID
        assert caught.value.param == "messages.1.tool_calls.0.function.arguments"
        assert caught.value.param in caught.value.message


def test_a_template_error_is_a_client_error_in_the_words_of_the_template(files):
    with pytest.raises(AppError, match="roles must alternate") as caught:
        render(files, "{{ raise_exception('roles must alternate') }}")
    assert caught.value.message == "roles must alternate"
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")


class TestBeginningOfText:
    """The text begins as in the template, and never with two BOS tokens."""

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
    def test_real_models_begin_with_at_most_one_bos_token(self, real_files, folder, begins):
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
    def test_a_template_that_writes_bos_gives_exactly_one(
        self, shared, files, tokenizers_by_kind, template, bos, add_bos
    ):
        """Also if the tokenizer adds BOS to plain texts, as those of Gemma and Llama do."""
        inner = tokenizers.Tokenizer.from_str(tokenizers_by_kind["byte_level"].to_str())
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

    def test_a_bos_token_in_a_user_message_is_kept(self, files, tokenizers_by_kind):
        source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        config = {"bos_token": "<s>", "add_bos_token": True}
        model = files(
            tokenizers_by_kind["sentence_piece"], chat_template=source, tokenizer_config=config
        )
        messages = (Message(role="user", content="<s>the"),)
        assert self.ids(model, messages)[1][:2] == [1, 1], (
            "the template and the user each wrote one"
        )
        plain = files(tokenizers_by_kind["sentence_piece"], tokenizer_config=config)
        assert self.ids(plain, messages)[1].count(1) == 1


def test_tokenizer_info_has_the_special_tokens_and_the_template(files):
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "name_or_path": "author/models",
    }
    model = files(tiny.tokenizer(), tokenizer_config=config, chat_template="{{ messages }}")
    assert build_tokenizer_info(model, Tokenizer.load(model), context=64) == {
        "tokenizer_class": "LlamaTokenizer",
        "model_max_length": 64,
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": None,
        "pad_token": None,
        "chat_template": "{{ messages }}",
    }


def test_tokenizer_info_has_special_tokens_of_config_json(files):
    config = {"eos_token_id": tiny.END, "bos_token_id": tiny.BOS}
    model = files(tiny.tokenizer(), config=config)
    info = build_tokenizer_info(model, Tokenizer.load(model), context=64)
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert info["chat_template"] is None
    bare = files(tiny.tokenizer())
    info = build_tokenizer_info(bare, Tokenizer.load(bare), context=64)
    assert (info["bos_token"], info["eos_token"]) == (None, None)
