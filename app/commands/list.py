"""`mlxrunner list`: lists the models installed on this machine.

Knows: the layout of the table. Must not know: the location of models. It does not import MLX for
supported models.
Therefore a model whose config.json has an invalid value is listed like a valid one; `show` reports
it.
"""

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from app import store
from app.core.errors import AppError, ErrorKind, escape_control_characters
from app.core.model_files import ModelFiles
from app.core.units import format_bytes
from app.images.processor import load_image_processor
from models.checkpoint_config import (
    find_unsupported_method,
    get_text_config,
    has_architecture,
)

_HEADER = ("NAME", "SOURCE", "SIZE", "ARCHITECTURE", "VISION", "MODIFIED")

# the maximum width of a name at which the other columns still fit in 80 characters
_MAX_NAME_WIDTH = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A row of the list. bytes: the size of all tensors. modified: the modification time as Unix
    time. vision: whether it processes images. problem: the reason why the model cannot be served,
    or None. If problem is set, bytes, architecture, modified and vision are unknown."""

    name: str
    source: str
    path: str
    bytes: int = 0
    architecture: str = ""
    modified: int = 0
    vision: bool = False
    problem: str | None = None


def list_models(*, as_json: bool, names_only: bool = False) -> int:
    """Prints the list and returns the exit status, which is 0 even if a model is broken.
    names_only: print one name per line and read no model."""
    if names_only:
        for entry in store.list_installed():
            print(entry.name)
        return 0
    rows = list(_collect_models())
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    for line in render_table(rows):
        print(escape_control_characters(line))
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
            size, vision = format_bytes(row.bytes), "yes" if row.vision else ""
            cells = (row.name, row.source, size, row.architecture, vision, day)
            if len(row.name) > width:
                yield row.name
                cells = ("", *cells[1:])
            yield _format_line(cells, width)
    for row in rows:
        if row.problem is not None:
            yield f"{row.name} ({row.source}) cannot be served: {row.problem}"


def get_architecture(files: ModelFiles) -> str:
    """Returns the model_type. For a multimodal model, this is the model_type of its text model."""
    return str(get_text_config(files.config).get("model_type"))


def _collect_models() -> Iterator[ListedModel]:
    for entry in store.list_installed():
        row = ListedModel(name=entry.name, source=entry.source, path=str(entry.path))
        try:
            files = entry.read()
            _check_support(files)
            vision = load_image_processor(files) is not None
        except AppError as error:
            yield dataclasses.replace(row, problem=error.message)
            continue
        yield dataclasses.replace(
            row,
            bytes=files.weight_bytes,
            architecture=get_architecture(files),
            modified=files.created,
            vision=vision,
        )


def _check_support(files: ModelFiles) -> None:
    """Raises AppError for an unsupported architecture or quantization. MLX is imported only for a
    model that is probably unsupported, to find out why."""
    config = get_text_config(files.config)
    if reason := find_unsupported_method(config):
        raise AppError(ErrorKind.MODEL_FILES, f"{files.path}: {reason}")
    if not has_architecture(config):
        from app.engine.model_info import complete_config

        complete_config(files)


def _format_line(cells: tuple[str, ...], width: int) -> str:
    name, source, size, kind, vision, day = cells
    return f"{name:<{width}}  {source:<8}  {size:>7}  {kind:<13}  {vision:<6}  {day}".rstrip()
