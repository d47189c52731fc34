"""Reads the headers of a model's weights on the hub, without the weights.

Knows: huggingface_hub's reader of headers, the safetensors format. Must not know: the use of the
headers.

A safetensors file begins with a header that lists its tensors. The files that are written here have
the header and the size of the real ones, but no content: they are sparse, and need no space on the
disk. Whatever reads only headers, such as the estimate of memory, works with them.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import SafetensorsParsingError

from app.core.model_files import ModelFiles
from app.store.hub.download_plan import DownloadPlan, RemoteFile
from app.store.hub.errors import model_error, translate_hub_errors, translate_response_errors
from app.store.hub.required_files import is_weights_file

# the number of headers that are read at the same time
_THREADS = 8

# the largest header that safetensors accepts
_MAX_HEADER_BYTES = 100_000_000


def write_weight_headers(plan: DownloadPlan, folder: Path) -> ModelFiles:
    """Writes weights without content to an empty folder, and returns the files of the model, of
    which no others exist. Raises AppError if the hub cannot be reached, or a header is invalid."""
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
