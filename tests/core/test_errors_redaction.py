"""Error messages about a model that cannot be loaded contain no paths."""

from pathlib import Path

from app.core.errors import AppError, ErrorKind, redact_paths
from tests.rows import rows

FOLDER = Path("/srv/some models/tiny")


@rows(
    ("message", "expected"),
    [
        (f"{FOLDER}: the config lacks x", "tiny: the config lacks x"),
        (f"{FOLDER}/model.safetensors is not whole", "tiny/model.safetensors is not whole"),
        (
            "ImportError: /opt/py/lib/libx.so.1: failed to map",
            "ImportError: libx.so.1: failed to map",
        ),
        ('File "/opt/py/a.py", line 3', 'File "a.py", line 3'),
        ("~/models/x is gone", "x is gone"),
        ("two\nlines", "two lines"),
        ("12/24 layers, and/or 3 tokens/s", "12/24 layers, and/or 3 tokens/s"),
        ("org/name is not here", "org/name is not here"),
        ("see http://127.0.0.1:8080/health", "see http://127.0.0.1:8080/health"),
        ("GET /v1/models lists the available models", "GET /v1/models lists the available models"),
    ],
)
def test_only_the_directories_of_a_path_are_removed(message: str, expected: str) -> None:
    error = AppError(ErrorKind.MODEL_FILES, message, param="model", code="c", retry_after=3)
    redacted = redact_paths(error, FOLDER, "tiny")
    assert redacted.message == expected
    assert (redacted.kind, redacted.param, redacted.code, redacted.retry_after) == (
        error.kind,
        error.param,
        error.code,
        error.retry_after,
    )


def test_paths_are_redacted_without_a_known_model_folder() -> None:
    error = AppError(ErrorKind.MODEL_FILES, "/a/b/c is gone")
    assert redact_paths(error, None, "tiny").message == "c is gone"
