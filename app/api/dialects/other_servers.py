"""Fields of other servers which this one does not have, and the values that change nothing.

Clients that were written for vLLM, SGLang, llama.cpp or text-generation-webui send these with every
request, mostly at the value that asks for nothing. At that value a field is accepted; at any other
it is refused by its name, because ignoring it would change the answer without a word.

Knows: one table. A row is deleted where its field becomes one of our own. Must not know: any field
that a dialect honours.

Names and defaults: vLLM's chat_completion/protocol.py and completion/protocol.py, SGLang 0.5.23's
entrypoints/openai/protocol.py, llama.cpp's tools/server/README.md, text-generation-inference's
GenerateParameters, text-generation-webui's extensions/openai/typing.py, mlx-lm's server.py.
"""

from dataclasses import dataclass
from typing import Literal

from app.api.fields import Fields, as_array, as_number, invalid, shown

Endpoint = Literal["chat", "completions", "responses", "embeddings"]

_GENERATING: tuple[Endpoint, ...] = ("chat", "completions", "responses")

VLLM, SGLANG, LLAMA, MLX = "vLLM", "SGLang", "llama.cpp", "mlx-lm"
TGI, WEBUI, OLLAMA = "text-generation-inference", "text-generation-webui", "Ollama"


@dataclass(frozen=True, slots=True)
class OtherField:
    """of: the servers that have it. neutral: JSON values that ask for what happens here anyway.
    any: the field belongs to something that is off here, so that every value of this kind is one of
    those; "texts" is a text or an array of texts."""

    name: str
    of: tuple[str, ...]
    neutral: tuple[object, ...]
    endpoints: tuple[Endpoint, ...]
    any: Literal["number", "text", "texts"] | None


def _row(
    name: str,
    *of: str,
    at: tuple[object, ...] = (),
    any: Literal["number", "text", "texts"] | None = None,
    on: tuple[Endpoint, ...] = _GENERATING,
) -> OtherField:
    assert at or any
    return OtherField(name, of, at, on, any)


OTHER_FIELDS = (
    # how the answer is written down
    _row("skip_special_tokens", VLLM, SGLANG, WEBUI, at=(True,)),
    _row("spaces_between_special_tokens", VLLM, at=(True,)),
    _row("include_stop_str_in_output", VLLM, at=(False,)),
    _row("no_stop_trim", SGLANG, at=(False,)),
    _row("include_reasoning", VLLM, at=(True,), on=("chat",)),
    _row("separate_reasoning", SGLANG, at=(True,), on=("chat",)),
    _row("stream_reasoning", SGLANG, at=(True,), on=("chat",)),
    _row("reasoning_format", LLAMA, at=("auto", "deepseek"), on=("chat",)),
    _row("parse_tool_calls", LLAMA, at=(True,), on=("chat",)),
    _row("stream_interval", VLLM, at=(1,)),
    _row("return_tokens_as_token_ids", VLLM, at=(False,)),
    _row("return_prompt_text", VLLM, at=(False,), on=("chat",)),
    _row("return_hidden_states", SGLANG, at=(False,)),
    _row("return_routed_experts", SGLANG, at=(False,)),
    _row("return_cached_tokens_details", SGLANG, at=(False,)),
    _row("return_meta_info", SGLANG, at=(False,)),
    _row("return_tokens", LLAMA, at=(False,)),
    _row("return_full_text", TGI, at=(False,)),
    _row("decoder_input_details", TGI, at=(False,)),
    _row("return_progress", LLAMA, at=(False,)),
    _row("timings_per_token", LLAMA, at=(False,)),
    _row("n_probs", LLAMA, at=(0,)),
    _row("post_sampling_probs", LLAMA, at=(False,)),
    # how the prompt is written
    _row("echo", VLLM, at=(False,), on=("chat",)),
    _row("add_generation_prompt", VLLM, LLAMA, at=(True,), on=("chat",)),
    _row("continue_final_message", VLLM, SGLANG, at=(False,), on=("chat",)),
    _row("add_special_tokens", VLLM, at=(False,), on=("chat",)),
    _row("add_special_tokens", VLLM, at=(True,), on=("completions", "embeddings")),
    _row("add_bos_token", WEBUI, at=(True,)),
    _row("documents", VLLM, at=([],), on=("chat",)),
    _row("mm_processor_kwargs", VLLM, SGLANG, at=({},)),
    _row("media_io_kwargs", VLLM, at=({},), on=("chat",)),
    _row("truncation_side", VLLM, any="text"),
    _row("negative_prompt", WEBUI, at=("",)),
    _row("guidance_scale", WEBUI, at=(1,)),
    # when it ends
    _row("stop_token_ids", VLLM, SGLANG, at=([],)),
    _row("n_predict", LLAMA, at=(-1,), on=("chat", "responses")),
    _row("n_indent", LLAMA, at=(0,)),
    _row("t_max_predict_ms", LLAMA, at=(0, -1)),
    _row("ban_eos_token", WEBUI, at=(False,)),
    # how tokens are drawn
    _row("use_beam_search", VLLM, at=(False,)),
    _row("length_penalty", VLLM, at=(1,)),
    _row("bad_words", VLLM, at=([],)),
    _row("custom_token_bans", WEBUI, at=("",)),
    _row("logits_processors", VLLM, at=([],)),
    _row("watermarking", VLLM, at=(False,)),
    _row("watermark", TGI, at=(False,)),
    _row("do_sample", TGI, WEBUI, at=(True,)),
    _row("best_of", VLLM, WEBUI, at=(1,), on=("chat",)),
    _row("min_keep", LLAMA, at=(0,)),
    _row("typical_p", LLAMA, TGI, WEBUI, at=(1,)),
    _row("top_a", WEBUI, at=(0,)),
    _row("tfs_z", LLAMA, at=(1,)),
    _row("tfs", WEBUI, at=(1,)),
    _row("top_n_sigma", LLAMA, WEBUI, at=(-1, 0)),
    _row("epsilon_cutoff", WEBUI, at=(0,)),
    _row("eta_cutoff", WEBUI, at=(0,)),
    _row("mirostat", LLAMA, at=(0,)),
    _row("mirostat_mode", WEBUI, at=(0,)),
    _row("mirostat_tau", LLAMA, WEBUI, any="number"),
    _row("mirostat_eta", LLAMA, WEBUI, any="number"),
    _row("dynatemp_range", LLAMA, at=(0,)),
    _row("dynamic_temperature", WEBUI, at=(False,)),
    _row("dynatemp_low", WEBUI, any="number"),
    _row("dynatemp_high", WEBUI, any="number"),
    _row("dynatemp_exponent", LLAMA, WEBUI, any="number"),
    _row("smoothing_factor", WEBUI, at=(0,)),
    _row("smoothing_curve", WEBUI, any="number"),
    _row("dry_multiplier", LLAMA, WEBUI, at=(0,)),
    _row("dry_base", LLAMA, WEBUI, any="number"),
    _row("dry_allowed_length", LLAMA, WEBUI, any="number"),
    _row("dry_penalty_last_n", LLAMA, any="number"),
    _row("dry_sequence_breakers", LLAMA, WEBUI, any="texts"),
    _row("xtc_probability", LLAMA, MLX, WEBUI, at=(0,)),
    _row("xtc_threshold", LLAMA, MLX, WEBUI, any="number"),
    _row("encoder_repetition_penalty", WEBUI, at=(1,)),
    _row("no_repeat_ngram_size", WEBUI, at=(0,)),
    _row("penalty_alpha", WEBUI, at=(0,)),
    _row("penalize_nl", LLAMA, at=(True,)),
    _row("grammar", LLAMA, at=("",)),
    _row("grammar_string", WEBUI, at=("",)),
    _row("guided_decoding_backend", VLLM, at=("auto", "guidance")),
    # where it is computed
    _row("priority", VLLM, SGLANG, at=(0,), on=(*_GENERATING, "embeddings")),
    _row("session_id", VLLM, SGLANG, any="text"),
    _row("id_slot", LLAMA, at=(-1,)),
    _row("n_cmpl", LLAMA, at=(1,)),
    _row("n_cache_reuse", LLAMA, at=(0,)),
    _row("n_keep", LLAMA, at=(0,)),
    _row("lora", LLAMA, at=([],)),
    _row("kv_transfer_params", VLLM, at=({},)),
    _row("vllm_xargs", VLLM, at=({},)),
    _row("custom_params", SGLANG, at=({},)),
    _row("num_draft_tokens", MLX, any="number"),
    _row("options", OLLAMA, at=({},)),
    # of vectors
    _row("normalize", VLLM, at=(True,), on=("embeddings",)),
    _row("embd_normalize", LLAMA, at=(2,), on=("embeddings",)),
)


def check_other_fields(fields: Fields, endpoint: Endpoint) -> None:
    """Raises AppError(INVALID) for a field of the table at a value that would change something."""
    for row in OTHER_FIELDS:
        if endpoint in row.endpoints:
            _check(fields, row)


def _check(fields: Fields, row: OtherField) -> None:
    value = fields.value(row.name)
    if value is None:
        return
    path = fields.path(row.name)
    match row.any:
        case None:
            fields.refuse(row.name, *row.neutral)
        case "number" if as_number(value) is None:
            raise invalid(path, f"{path} must be a number, not {shown(value)}")
        case "text" if not isinstance(value, str):
            raise invalid(path, f"{path} must be a string, not {shown(value)}")
        case "texts" if not _texts(value):
            raise invalid(path, f"{path} must be a string or an array of strings")
        case _:
            pass


def _texts(value: object) -> bool:
    array = as_array(value)
    return all(isinstance(text, str) for text in ([value] if array is None else array))
