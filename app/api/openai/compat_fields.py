"""Compat fields: fields that this server does not support, and their values that have no effect.

Knows: one table of fields. When a field becomes supported, delete its row. Must not know: the
fields that a dialect supports.

Clients written for other servers send these fields with every request, usually with the default
value, which is accepted. Any other value is rejected with an error that identifies the field,
because ignoring the value would silently change the output. A field that cannot affect the output
is accepted with any value of its type.

Names and defaults: vLLM's chat_completion/protocol.py and completion/protocol.py, SGLang 0.5.23's
entrypoints/openai/protocol.py, llama.cpp's tools/server/README.md, text-generation-inference's
GenerateParameters, text-generation-webui's extensions/openai/typing.py, mlx-lm's server.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from app.api.fields import Fields, as_array, as_number, invalid_request, quote_value

Endpoint = Literal["chat", "completions", "responses", "embeddings"]

_GENERATING: tuple[Endpoint, ...] = ("chat", "completions", "responses")

VLLM, SGLANG, LLAMA, MLX = "vLLM", "SGLang", "llama.cpp", "mlx-lm"
TGI, WEBUI, OLLAMA = "text-generation-inference", "text-generation-webui", "Ollama"
OPENAI, CODEX, OPENROUTER, OPENCODE = "OpenAI", "Codex", "OpenRouter", "opencode"

AnyType = Literal["number", "boolean", "text", "texts", "object", "array"]


@dataclass(frozen=True, slots=True)
class CompatField:
    """A field and its accepted values.

    servers: the servers that have the field, or the clients that send it. neutral: JSON values that
    match the behavior of this server. any_type: the accepted type of a field that configures a
    missing feature or does not affect the output. Every value of this type is accepted; "texts"
    means a text or an array of texts.
    """

    name: str
    servers: tuple[str, ...]
    neutral: tuple[object, ...]
    endpoints: tuple[Endpoint, ...]
    any_type: AnyType | None


def _row(
    name: str,
    *servers: str,
    neutral: tuple[object, ...] = (),
    any_type: AnyType | None = None,
    endpoints: tuple[Endpoint, ...] = _GENERATING,
) -> CompatField:
    assert neutral or any_type
    return CompatField(name, servers, neutral, endpoints, any_type)


COMPAT_FIELDS = (
    # output format
    _row("skip_special_tokens", VLLM, SGLANG, WEBUI, neutral=(True,)),
    _row("spaces_between_special_tokens", VLLM, neutral=(True,)),
    _row("no_stop_trim", SGLANG, neutral=(False,)),
    _row("include_reasoning", VLLM, neutral=(True,), endpoints=("chat",)),
    _row("separate_reasoning", SGLANG, neutral=(True,), endpoints=("chat",)),
    _row("stream_reasoning", SGLANG, neutral=(True,), endpoints=("chat",)),
    _row("reasoning_format", LLAMA, neutral=("auto", "deepseek"), endpoints=("chat",)),
    _row("parse_tool_calls", LLAMA, neutral=(True,), endpoints=("chat",)),
    _row("stream_interval", VLLM, neutral=(1,)),
    _row("return_tokens_as_token_ids", VLLM, neutral=(False,)),
    _row("return_prompt_text", VLLM, neutral=(False,), endpoints=("chat",)),
    _row("return_hidden_states", SGLANG, neutral=(False,)),
    _row("return_routed_experts", SGLANG, neutral=(False,)),
    _row("return_cached_tokens_details", SGLANG, neutral=(False,)),
    _row("return_meta_info", SGLANG, neutral=(False,)),
    _row("return_tokens", LLAMA, neutral=(False,)),
    _row("return_full_text", TGI, neutral=(False,)),
    _row("decoder_input_details", TGI, neutral=(False,)),
    _row("return_progress", LLAMA, neutral=(False,)),
    _row("n_probs", LLAMA, neutral=(0,)),
    _row("post_sampling_probs", LLAMA, neutral=(False,)),
    # prompt format
    _row("echo", VLLM, neutral=(False,), endpoints=("chat",)),
    _row("add_special_tokens", VLLM, neutral=(False,), endpoints=("chat",)),
    _row("add_special_tokens", VLLM, neutral=(True,), endpoints=("completions", "embeddings")),
    _row("add_bos_token", WEBUI, neutral=(True,)),
    _row("documents", VLLM, neutral=([],), endpoints=("chat",)),
    _row("mm_processor_kwargs", VLLM, SGLANG, neutral=({},)),
    _row("media_io_kwargs", VLLM, neutral=({},), endpoints=("chat",)),
    _row("truncation_side", VLLM, any_type="text"),
    _row("negative_prompt", WEBUI, neutral=("",)),
    _row("guidance_scale", WEBUI, neutral=(1,)),
    # end of the output
    _row("n_predict", LLAMA, neutral=(-1,), endpoints=("chat", "responses")),
    _row("n_indent", LLAMA, neutral=(0,)),
    _row("t_max_predict_ms", LLAMA, neutral=(0, -1)),
    _row("ban_eos_token", WEBUI, neutral=(False,)),
    # sampling
    _row("use_beam_search", VLLM, neutral=(False,)),
    _row("length_penalty", VLLM, neutral=(1,)),
    _row("custom_token_bans", WEBUI, neutral=("",)),
    _row("logits_processors", VLLM, neutral=([],)),
    _row("watermarking", VLLM, neutral=(False,)),
    _row("watermark", TGI, neutral=(False,)),
    _row("do_sample", TGI, WEBUI, neutral=(True,)),
    _row("best_of", VLLM, WEBUI, neutral=(1,), endpoints=("chat",)),
    _row("min_keep", LLAMA, neutral=(0,)),
    _row("typical_p", LLAMA, TGI, WEBUI, neutral=(1,)),
    _row("top_a", WEBUI, neutral=(0,)),
    _row("tfs_z", LLAMA, neutral=(1,)),
    _row("tfs", WEBUI, neutral=(1,)),
    _row("top_n_sigma", LLAMA, WEBUI, neutral=(-1, 0)),
    _row("epsilon_cutoff", WEBUI, neutral=(0,)),
    _row("eta_cutoff", WEBUI, neutral=(0,)),
    _row("mirostat", LLAMA, neutral=(0,)),
    _row("mirostat_mode", WEBUI, neutral=(0,)),
    _row("mirostat_tau", LLAMA, WEBUI, any_type="number"),
    _row("mirostat_eta", LLAMA, WEBUI, any_type="number"),
    _row("dynatemp_range", LLAMA, neutral=(0,)),
    _row("dynamic_temperature", WEBUI, neutral=(False,)),
    _row("dynatemp_low", WEBUI, any_type="number"),
    _row("dynatemp_high", WEBUI, any_type="number"),
    _row("dynatemp_exponent", LLAMA, WEBUI, any_type="number"),
    _row("smoothing_factor", WEBUI, neutral=(0,)),
    _row("smoothing_curve", WEBUI, any_type="number"),
    _row("dry_multiplier", LLAMA, WEBUI, neutral=(0,)),
    _row("dry_base", LLAMA, WEBUI, any_type="number"),
    _row("dry_allowed_length", LLAMA, WEBUI, any_type="number"),
    _row("dry_penalty_last_n", LLAMA, any_type="number"),
    _row("dry_sequence_breakers", LLAMA, WEBUI, any_type="texts"),
    _row("xtc_probability", LLAMA, MLX, WEBUI, neutral=(0,)),
    _row("xtc_threshold", LLAMA, MLX, WEBUI, any_type="number"),
    _row("encoder_repetition_penalty", WEBUI, neutral=(1,)),
    _row("no_repeat_ngram_size", WEBUI, neutral=(0,)),
    _row("penalty_alpha", WEBUI, neutral=(0,)),
    _row("penalize_nl", LLAMA, neutral=(True,)),
    _row("grammar", LLAMA, neutral=("",)),
    _row("grammar_string", WEBUI, neutral=("",)),
    _row("guided_decoding_backend", VLLM, neutral=("auto", "guidance")),
    # accounting and caching: no value affects the output
    _row("client_metadata", CODEX, any_type="object"),
    _row("usage", OPENROUTER, neutral=({"include": True}, {"include": False})),
    _row("session_id", VLLM, SGLANG, OPENROUTER, any_type="text"),
    _row("request_id", VLLM, any_type="text"),
    _row("timings_per_token", LLAMA, any_type="boolean"),
    _row("cache_control", OPENROUTER, any_type="object"),
    _row("promptCacheKey", OPENCODE, any_type="text"),
    _row(
        "prompt_cache_retention",
        OPENAI,
        neutral=("in_memory", "in-memory", "24h"),
        endpoints=("chat", "responses"),
    ),
    # scheduling and placement
    _row("priority", VLLM, SGLANG, neutral=(0,), endpoints=(*_GENERATING, "embeddings")),
    _row("id_slot", LLAMA, neutral=(-1,)),
    _row("n_cmpl", LLAMA, neutral=(1,)),
    _row("n_cache_reuse", LLAMA, neutral=(0,)),
    _row("n_keep", LLAMA, neutral=(0,)),
    _row("lora", LLAMA, neutral=([],)),
    _row("kv_transfer_params", VLLM, neutral=({},)),
    _row("vllm_xargs", VLLM, neutral=({},)),
    _row("custom_params", SGLANG, neutral=({},)),
    _row("num_draft_tokens", MLX, any_type="number"),
    _row("options", OLLAMA, neutral=({},)),
    # embeddings
    _row("normalize", VLLM, neutral=(True,), endpoints=("embeddings",)),
    _row("embd_normalize", LLAMA, neutral=(2,), endpoints=("embeddings",)),
)


# Fields of messages, content parts and tools that do not affect the output: Anthropic's cache
# breakpoints, and fields that other servers add to messages that a client sends back.
PART_FIELDS = (_row("cache_control", OPENROUTER, any_type="object"),)
MESSAGE_FIELDS = (
    *PART_FIELDS,
    _row("id", OPENROUTER, any_type="text"),
    _row("reasoning_details", OPENROUTER, any_type="array"),
)


def check_compat_fields(fields: Fields, endpoint: Endpoint) -> None:
    """Raises AppError(INVALID) if a field in the table has a value that would have an effect."""
    check_fields(fields, [row for row in COMPAT_FIELDS if endpoint in row.endpoints])


def check_fields(fields: Fields, rows: Iterable[CompatField]) -> None:
    """Raises AppError(INVALID) if a field has a value that would have an effect."""
    for row in rows:
        _check(fields, row)


def _check(fields: Fields, row: CompatField) -> None:
    value = fields.value(row.name)
    if value is None:
        return
    match row.any_type:
        case None:
            fields.reject(row.name, *row.neutral)
        case "boolean":
            fields.boolean(row.name)
        case "text":
            fields.string(row.name)
        case "object":
            fields.nested(row.name)
        case "array":
            fields.array(row.name)
        case "number" | "texts":
            _check_number_or_texts(fields.path(row.name), value, row.any_type)


def _check_number_or_texts(path: str, value: object, type_: Literal["number", "texts"]) -> None:
    if type_ == "number" and as_number(value) is None:
        raise invalid_request(path, f"{path} must be a number, not {quote_value(value)}")
    if type_ == "texts" and not _is_string_or_strings(value):
        raise invalid_request(path, f"{path} must be a string or an array of strings")


def _is_string_or_strings(value: object) -> bool:
    array = as_array(value)
    return all(isinstance(text, str) for text in ([value] if array is None else array))
