"""`python -m app.runners.preflight_main`: the process that estimates the memory requirement of a
model.

Knows: one line of input, one line of output. Must not know: requests. The process runs for one
estimate, and exits if its parent exits.
"""

import sys

from app.core.errors import AppError
from app.runners import parent_watch
from app.runners.codec import Codec
from app.runners.preflight import EstimateError, EstimateRequest, EstimateResponse


def main() -> int:
    parent_watch.tie_to_parent()
    line = parent_watch.read_first_line()
    if not line:
        return 1
    question = Codec[EstimateRequest](EstimateRequest).decode(line)
    parent_watch.exit_with_parent(question.parent_pid)
    # This import is slow, so it comes after `exit_with_parent`.
    from app.engine.fit import estimate_memory

    try:
        found = estimate_memory(question.files, question.settings, question.loaded_bytes)
    except AppError as error:
        found = EstimateError(kind=error.kind, message=error.message)
    sys.stdout.buffer.write(
        Codec[EstimateResponse](EstimateResponse).encode(EstimateResponse(result=found)) + b"\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
