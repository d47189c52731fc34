"""`mlxrunner show`: describes a model and whether it fits in memory, without loading its weights.

Knows: the wording and layout of the description. Must not know: the computations of other packages.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from app import store
from app.commands.list import get_architecture
from app.core.errors import escape_control_characters
from app.core.model_files import ModelFiles, read_generation_defaults
from app.core.settings import Settings
from app.core.terminal import print_message
from app.core.units import format_bytes, format_count, format_memory
from app.engine.fit import Fit, estimate_before_load, open_with_settings
from app.engine.model_info import complete_config
from app.engine.parameter_count import ParameterCount, count_parameters
from app.store.gguf.model import is_gguf_model
from app.store.gguf.summary import count_types
from models.architectures import get_tower
from models.cpu_layout import get_activation_bits


def show(settings: Settings, *, as_json: bool) -> int:
    """Prints a description of each model and returns the exit status.

    settings: the models, and the settings with which they would be served. as_json: whether to
    print one JSON object per model. Raises AppError for a model that could not be served.
    """
    if not settings.models:
        _show(None, settings, as_json=as_json)
    for model in settings.models:
        own = settings.for_model(model)
        # ignore the other models, so that this one may use the memory budget of all models
        alone = dataclasses.replace(own, memory=own.memory or settings.memory)
        _show(model.name, alone, as_json=as_json)
    return 0


def _show(name: str | None, settings: Settings, *, as_json: bool) -> None:
    files = complete_config(store.find(name))
    holds, model = count_parameters(files), open_with_settings(files, settings)
    fits, activations = estimate_before_load(model, files, settings), get_activation_bits(model)
    if warning := files.describe_excess(settings.context):
        print_message(warning)
    vision = model.image_rules is not None and get_tower(model) is not None
    if as_json:
        print(json.dumps(_build_report(files, holds, activations, fits, vision=vision), indent=2))
        return
    print(escape_control_characters(files.name))
    for label, value in _render_lines(files, holds, activations, fits, vision=vision):
        print(escape_control_characters(f"  {label:<13} {value}"))


def _build_report(
    files: ModelFiles,
    contents: ParameterCount,
    activations: int | None,
    fit_report: Fit,
    *,
    vision: bool,
) -> Mapping[str, Any]:
    return {
        "name": files.name,
        "path": str(files.path),
        "architecture": get_architecture(files),
        "input_modalities": ["text", "image"] if vision else ["text"],
        "parameters": contents.parameters,
        "bytes": contents.nbytes,
        "file_bytes": files.weight_bytes,
        "converted": contents.conversion and contents.conversion.describe(),
        "bits": round(contents.bits_per_parameter, 3),
        "kinds": contents.by_format,
        "types": _count_types(files),
        "activations": activations,
        "batched": contents.shares_pass,
        "context_length": files.context_length,
        "vocab_size": files.vocab_size,
        "template": _find_template_file(files),
        "system": files.system_prompt,
        "defaults": _list_defaults(files),
        "modified": files.created,
        "fit": dataclasses.asdict(fit_report),
    }


def _render_lines(
    files: ModelFiles,
    contents: ParameterCount,
    activations: int | None,
    fit_report: Fit,
    *,
    vision: bool,
) -> Iterator[tuple[str, str]]:
    yield "path", str(files.path)
    yield "architecture", get_architecture(files)
    yield "input", "text, images" if vision else "text"
    yield "parameters", format_count(contents.parameters)
    yield (
        "weights",
        f"{format_bytes(contents.nbytes)}, {contents.bits_per_parameter:.3g} bits per parameter",
    )
    for kind, count in contents.by_format.items():
        if share := 100 * count / max(contents.parameters, 1):
            yield "", f"{share:.3g} % {kind}"
    for group, types in (_count_types(files) or {}).items():
        yield group, _format_shares(types)
    if activations is not None:
        yield "activations", f"{activations} bits in 4- and 8-bit layers"
    if contents.conversion is not None:
        yield "converted", contents.conversion.describe()
        sizes = format_bytes(files.weight_bytes), format_bytes(contents.nbytes)
        yield "", f"{sizes[0]} in the files, {sizes[1]} in memory"
    if not contents.shares_pass:
        yield "batching", "none: sequences are computed one by one"
    yield "context", f"{files.context_length} tokens"
    yield "vocabulary", f"{files.vocab_size} ids"
    yield "chat template", _find_template_file(files) or "none"
    if files.system_prompt is not None:
        yield "system prompt", _shorten(files.system_prompt)
    for key, value in _list_defaults(files).items():
        yield "default", f"{key} {value}"
    yield "memory", _format_memory_needed(fit_report)
    yield "", _format_verdict(fit_report)


def _count_types(files: ModelFiles) -> Mapping[str, Mapping[str, int]] | None:
    """Returns the types in each group of tensors of a GGUF file. None for other models."""
    return count_types(files.shards[0]) if is_gguf_model(files) else None


def _format_shares(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    if len(counts) == 1:
        return "".join(counts)
    return ", ".join(f"{100 * count / total:.3g} % {kind}" for kind, count in counts.items())


def _find_template_file(files: ModelFiles) -> str | None:
    """Returns the name of the file with the chat template, or None."""
    if files.chat_template is not None:
        return files.chat_template_file
    return "tokenizer_config.json" if files.tokenizer_config.get("chat_template") else None


def _list_defaults(files: ModelFiles) -> Mapping[str, Any]:
    """Returns the defaults recommended by the model's authors. Requests may override them."""
    found = read_generation_defaults(files)
    defaults: dict[str, Any] = dict(found.sampling)
    if found.max_tokens is not None:
        defaults["max_tokens"] = found.max_tokens
    if found.stop_strings:
        defaults["stop"] = list(found.stop_strings)
    if files.recommended_context is not None:
        defaults["context"] = files.recommended_context
    return defaults


def _format_memory_needed(fit_report: Fit) -> str:
    many = "one sequence" if fit_report.sequences == 1 else f"{fit_report.sequences} sequences"
    return f"{format_memory(fit_report.needed)} for {many} of {fit_report.context} tokens"


def _format_verdict(fit_report: Fit) -> str:
    room = f"the {format_memory(fit_report.budget)} available"
    if fit_report.context_that_fits >= fit_report.context:
        return f"fits in {room}"
    if fit_report.context_that_fits:
        return (
            f"does not fit in {room}: at most {fit_report.context_that_fits} tokens of context fit"
        )
    return f"does not fit in {room} at any context length"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
