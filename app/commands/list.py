"""`mlxrunner list`: lists the models installed on this machine.

Knows: the layout of the table. Must not know: the location of models.
"""

import dataclasses
import json
import runpy
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from app import store
from app.core.errors import AppError
from app.core.model_files import ModelFiles
from app.core.units import format_bytes

_HEADER = ("NAME", "SOURCE", "SIZE", "ARCHITECTURE", "MODIFIED")

# the package of the architectures, which is not imported
_MODELS = Path(__file__).resolve().parents[2] / "models"

# the maximum width of a name at which the other columns still fit in 80 characters
_MAX_NAME_WIDTH = 33


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A row of the list. bytes: the size of all tensors. modified: the modification time as Unix
    time. problem: the reason why the model cannot be served, or None. If problem is set, bytes,
    architecture and modified are unknown."""

    name: str
    source: str
    path: str
    bytes: int = 0
    architecture: str = ""
    modified: int = 0
    problem: str | None = None


def list_models(*, as_json: bool) -> int:
    """Prints the list and returns the exit status, which is 0 even if a model is broken."""
    rows = list(_collect_models())
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    for line in render_table(rows):
        print(line)
    return 0


def render_table(rows: Iterable[ListedModel]) -> Iterator[str]:
    """Yields the lines of the table. A line has at most 80 characters. The exceptions are long
    names, which get their own line, and the problems of broken models."""
    rows = list(rows)
    width = min(_MAX_NAME_WIDTH, max([len(row.name) for row in rows] + [len(_HEADER[0])]))
    yield _format_line(_HEADER, width)
    for row in rows:
        if row.problem is None:
            day = time.strftime("%Y-%m-%d", time.localtime(row.modified))
            cells = (row.name, row.source, format_bytes(row.bytes), row.architecture, day)
            if len(row.name) > width:
                yield row.name
                cells = ("", *cells[1:])
            yield _format_line(cells, width)
    for row in rows:
        if row.problem is not None:
            yield f"{row.name} ({row.source}) cannot be served: {row.problem}"


def get_architecture(files: ModelFiles) -> str:
    """Returns the model_type. For a multimodal model, this is the model_type of its text model."""
    text: Any = files.config.get("text_config")
    own = None
    if isinstance(text, Mapping):
        own = cast("Mapping[str, Any]", text).get("model_type")
    return str(own or files.config.get("model_type"))


def _collect_models() -> Iterator[ListedModel]:
    for entry in store.list_installed():
        row = ListedModel(name=entry.name, source=entry.source, path=str(entry.path))
        try:
            files = _check_servable(entry.read())
        except AppError as error:
            yield dataclasses.replace(row, problem=error.message)
            continue
        yield dataclasses.replace(
            row,
            bytes=files.weight_bytes,
            architecture=get_architecture(files),
            modified=files.created,
        )


def _check_servable(files: ModelFiles) -> ModelFiles:
    """Raises AppError for a model that cannot be served. An architecture of this project is known
    by its file. MLX, whose import takes longer than the list, is imported only to find out what is
    wrong with another model, or whether mlx-lm supports it."""
    kind = get_architecture(files)
    aliases: Mapping[str, str] = runpy.run_path(str(_MODELS / "aliases.py"))["ALIASES"]
    is_known = (_MODELS / f"{aliases.get(kind, kind)}.py").is_file()
    is_plain = bool(files.config.get("quantization")) or "quantization_config" not in files.config
    if is_known and is_plain:
        return files
    from app.engine.model_info import complete_config

    return complete_config(files)


def _format_line(cells: tuple[str, ...], width: int) -> str:
    name, source, size, kind, day = cells
    return f"{name:<{width}}  {source:<8}  {size:>7}  {kind:<13}  {day}".rstrip()
