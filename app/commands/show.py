"""`mlxrunner show`: what a model is, and whether it fits, without reading it.

Knows: words for what the rooms tell. Must not know: how they found out.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from app import store
from app.commands.listing import architecture
from app.core.amounts import in_bytes, in_memory, in_short
from app.core.defaults import defaults
from app.core.files import ModelFiles
from app.core.settings import Settings
from app.engine.contents import Contents, contents
from app.engine.describe import complete
from app.engine.fit import Fit, fit


def show(settings: Settings, *, as_json: bool) -> int:
    """The exit status. settings: the models, and with what they would be served; in JSON one object
    for each. Raises AppError for a model that could not be."""
    if not settings.models:
        _show(None, settings, as_json=as_json)
    for model in settings.models:
        own = settings.of(model)
        # of the others nothing is asked here: alone, it may have what all may
        alone = dataclasses.replace(own, memory=own.memory or settings.memory)
        _show(model.name, alone, as_json=as_json)
    return 0


def _show(name: str | None, settings: Settings, *, as_json: bool) -> None:
    files = complete(store.find(name))
    holds, fits = contents(files), fit(files, settings)
    if as_json:
        print(json.dumps(_facts(files, holds, fits), indent=2))
        return
    print(files.name)
    for label, value in _lines(files, holds, fits):
        print(f"  {label:<13} {value}")


def _facts(files: ModelFiles, holds: Contents, fits: Fit) -> Mapping[str, Any]:
    return {
        "name": files.name,
        "path": str(files.path),
        "architecture": architecture(files),
        "parameters": holds.parameters,
        "bytes": holds.nbytes,
        "bits": round(holds.bits, 3),
        "kinds": holds.kinds,
        "context_length": files.context_length,
        "vocab_size": files.vocab_size,
        "template": _template(files),
        "system": files.system,
        "defaults": _defaults(files),
        "modified": files.created,
        "fit": dataclasses.asdict(fits),
    }


def _lines(files: ModelFiles, holds: Contents, fits: Fit) -> Iterator[tuple[str, str]]:
    yield "path", str(files.path)
    yield "architecture", architecture(files)
    yield "parameters", in_short(holds.parameters)
    yield "weights", f"{in_bytes(holds.nbytes)}, {holds.bits:.3g} bits per parameter"
    for kind, count in holds.kinds.items():
        if share := 100 * count / max(holds.parameters, 1):
            yield "", f"{share:.3g} % {kind}"
    yield "context", f"{files.context_length} tokens"
    yield "vocabulary", f"{files.vocab_size} ids"
    yield "chat template", _template(files) or "none"
    if files.system is not None:
        yield "system prompt", _shortened(files.system)
    for key, value in _defaults(files).items():
        yield "default", f"{key} {value}"
    yield "memory", _needs(fits)
    yield "", _verdict(fits)


def _template(files: ModelFiles) -> str | None:
    """The file that it is in."""
    if files.template is not None:
        return "chat_template.jinja"
    return "tokenizer_config.json" if files.tokenizer_config.get("chat_template") else None


def _defaults(files: ModelFiles) -> Mapping[str, Any]:
    """What the model's makers recommend, which a request may change."""
    found = defaults(files)
    told: dict[str, Any] = dict(found.sampling)
    if found.max_tokens is not None:
        told["max_tokens"] = found.max_tokens
    if found.stops:
        told["stop"] = list(found.stops)
    if files.context is not None:
        told["context"] = files.context
    return told


def _needs(fits: Fit) -> str:
    many = "one sequence" if fits.sequences == 1 else f"{fits.sequences} sequences"
    return f"{in_memory(fits.needed)} for {many} of {fits.context} tokens"


def _verdict(fits: Fit) -> str:
    room = f"the {in_memory(fits.budget)} available"
    if fits.context_that_fits >= fits.context:
        return f"fits in {room}"
    if fits.context_that_fits:
        return f"does not fit in {room}: at most {fits.context_that_fits} tokens of context fit"
    return f"does not fit in {room} at any context length"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
