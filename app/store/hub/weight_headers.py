"""Reads the headers of a model's weights on the hub, without the weights.

Knows: huggingface_hub's reader of headers, the safetensors format, which files are GGUF. Must not
know: the use of the headers.

A safetensors or GGUF file begins with a header that lists its tensors. The files that are written
here have the header and the size of the real ones, but no content: they are sparse, and need no
space on the disk. Whatever reads only headers, such as the estimate of memory, works with them.
"""

import contextlib
import json
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from httpx2 import RemoteProtocolError, TransportError
from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import (
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
    hf_raise_for_status,
)

from app.core.errors import AppError, ErrorKind
from app.core.model_files import Json, ModelFiles
from app.store.gguf import model as gguf_model
from app.store.gguf.projector import is_projector
from app.store.hub.download_plan import DownloadPlan, RemoteFile
from app.store.hub.errors import model_error, translate_hub_errors, translate_response_errors
from app.store.hub.required_files import is_weights_file

# the number of headers that are read at the same time
_THREADS = 8

# the status of a response with the requested range of a file
_PARTIAL_CONTENT = 206

# the number of broken connections after which reading a header fails
_MAX_FAILURES = 4

# the largest header that safetensors accepts
_MAX_HEADER_BYTES = 100_000_000


def write_weight_headers(plan: DownloadPlan, folder: Path) -> ModelFiles:
    """Writes weight files that contain only headers to an empty folder, and returns the model with
    these files. It has no others. Raises AppError if the hub cannot be reached, or a header is
    invalid."""
    if plan.is_gguf:
        return _write_gguf_headers(plan, folder)
    weights = [file for file in plan.files if is_weights_file(file.path)]
    shards = [folder / f"{n}.safetensors" for n in range(len(weights))]
    with translate_hub_errors(plan.name), translate_response_errors(plan.name):
        with ThreadPoolExecutor(_THREADS) as threads:
            headers = list(threads.map(partial(_read_header, plan), weights))
        for shard, file, header in zip(shards, weights, headers, strict=True):
            with shard.open("wb") as out:
                out.write(len(header).to_bytes(8, "little") + header)
                out.truncate(len(header) + 8 + _count_data_bytes(header, file))
    return ModelFiles(
        name=str(plan.name),
        path=folder,
        config=plan.config,
        shards=tuple(shards),
        tokenizer_path=folder / "tokenizer.json",
        tokenizer_config={},
        generation_config={},
        chat_template=None,
        created=0,
        weight_bytes=sum(file.size for file in weights),
    )


def read_gguf_config(plan: DownloadPlan) -> Json:
    """Reads the config of a model in GGUF. Raises AppError if the hub cannot be reached, and
    AppError(INVALID) if the model could not be served, for example because of its tokenizer."""
    with TemporaryDirectory(prefix="mlxrunner-header-") as folder:
        return _write_gguf_headers(plan, Path(folder)).config


def _write_gguf_headers(plan: DownloadPlan, folder: Path) -> ModelFiles:
    """The files of a plan are the model's, followed by its projector."""
    paths = [folder / Path(file.path).name for file in plan.files]
    projectors = [path for path in paths if is_projector(path.name)]
    with translate_hub_errors(plan.name), _name_repository(plan, folder):
        for file, path in zip(plan.files, paths, strict=True):
            try:
                gguf_model.copy_header(partial(_read_range, plan, file), file.size, path)
            except AppError:
                if path not in projectors:  # a projector that cannot be used costs only the images
                    raise
    with _name_repository(plan, folder):
        return gguf_model.read(paths[0], name=str(plan.name), projectors=projectors)


@contextlib.contextmanager
def _name_repository(plan: DownloadPlan, folder: Path) -> Generator[None]:
    """Raises AppError(INVALID) for a file that cannot be served, with the name of the repository
    instead of the folder."""
    try:
        yield
    except AppError as error:
        message = error.message.replace(str(folder), plan.name.repo_id)
        raise AppError(ErrorKind.INVALID, f"{message}; nothing was downloaded") from error


def _read_range(plan: DownloadPlan, file: RemoteFile, offset: int, count: int) -> bytes:
    """Reads `count` bytes of a file, or fewer at its end. Continues after a broken connection."""
    end, failures, data = min(offset + count, file.size), 0, bytearray()
    while offset + len(data) < end:
        try:
            for part in _stream_range(plan, file, offset + len(data), end):
                data += part
        except TransportError:
            failures += 1
            if failures > _MAX_FAILURES:
                raise
    return bytes(data)


def _stream_range(plan: DownloadPlan, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
    url = hf_hub_url(plan.name.repo_id, file.path, revision=plan.commit)
    headers = {
        **build_hf_headers(),
        "Accept-Encoding": "identity",
        "Range": f"bytes={start}-{end - 1}",
    }
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        if start and response.status_code != _PARTIAL_CONTENT:
            raise model_error(plan.name, f"cannot be read in parts: {file.path}")
        for part in response.iter_raw():
            yield part[: end - start]
            start += len(part)
            if start >= end:  # a server that ignores ranges sends the whole file
                return
    if start < end:
        raise RemoteProtocolError("the response is too short")


def _read_header(plan: DownloadPlan, file: RemoteFile) -> bytes:
    try:
        metadata = HfApi().parse_safetensors_file_metadata(
            plan.name.repo_id, file.path, revision=plan.commit
        )
    except SafetensorsParsingError as error:
        raise model_error(plan.name, f"has no valid header in {file.path}") from error
    header: dict[str, Any] = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
        for name, tensor in metadata.tensors.items()
    }
    if metadata.metadata:
        header["__metadata__"] = metadata.metadata
    text = json.dumps(header).encode()
    if len(text) > _MAX_HEADER_BYTES:
        raise model_error(plan.name, f"has too large a header in {file.path}")
    return text


def _count_data_bytes(header: bytes, file: RemoteFile) -> int:
    """Returns the number of bytes after the header, which cannot exceed the size of the file."""
    tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
    end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    if not 0 <= end <= file.size:
        raise ValueError(f"the header of {file.path} does not match its size")
    return end
