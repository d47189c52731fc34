"""Fields of other servers that would change a response and that this server does not support.

Knows: their names, and their values that have no effect. Must not know: the supported fields.

Clients written for vLLM, llama.cpp, SGLang or text-generation-webui send these fields, usually with
a value without effect, which is accepted. Any other value is rejected with an error that identifies
the field, because ignoring it would silently change the output. When a field becomes supported,
delete its line. Fields that cannot change a response do not belong here: decode.py in this folder
ignores and reports them.
"""

from collections.abc import Mapping
from typing import Literal

Endpoint = Literal["chat", "completions", "responses", "embeddings"]

# The fields of all endpoints that generate text, with the values that have no effect.
_GENERATION: Mapping[str, tuple[object, ...]] = {
    # the format of the output
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "no_stop_trim": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_meta_info": (False,),
    "return_tokens": (False,),
    "return_full_text": (False,),
    "decoder_input_details": (False,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    # the prompt
    "add_bos_token": (True,),
    "negative_prompt": ("",),
    "guidance_scale": (1,),
    "options": ({},),
    "lora": ([],),
    # the end of the output
    "t_max_predict_ms": (0, -1),
    "ban_eos_token": (False,),
    # sampling
    "use_beam_search": (False,),
    "custom_token_bans": ("",),
    "logits_processors": ([],),
    "watermark": (False,),
    "watermarking": (False,),
    "do_sample": (True,),
    "typical_p": (1,),
    "typ_p": (1,),
    "top_a": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "dynamic_temperature": (False,),
    "smoothing_factor": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "penalty_alpha": (0,),
    "grammar_string": ("",),
}

# The further fields of each endpoint.
_BY_ENDPOINT: Mapping[Endpoint, Mapping[str, tuple[object, ...]]] = {
    "chat": {
        "add_special_tokens": (False,),
        "best_of": (1,),
        "documents": ([],),
        "echo": (False,),
        "include_reasoning": (True,),
        "parse_tool_calls": (True,),
        "reasoning_format": ("auto", "deepseek"),
        "return_prompt_text": (False,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
    },
    "completions": {"add_special_tokens": (True,)},
    "responses": {"grammar": ("",), "n_predict": (-1,), "return_progress": (False,)},
    "embeddings": {
        "add_special_tokens": (True,),
        "embd_normalize": (2,),
        "normalize": (True,),
        "truncate": (False,),
    },
}


def list_unsupported_fields(endpoint: Endpoint) -> Mapping[str, tuple[object, ...]]:
    """Returns the fields of an endpoint, each with the values that have no effect."""
    own = _BY_ENDPOINT[endpoint]
    return own if endpoint == "embeddings" else {**_GENERATION, **own}
