"""`python -m app.runners.preflight_main`: the process that estimates the memory requirement of a
model.

Knows: its input and output, one message each. Must not know: requests. The process runs for one
estimate, and exits if its parent exits.
"""

import os
import sys
from functools import partial

from app.core.errors import AppError
from app.runners import parent_watch
from app.runners.channel import encode, make_decoder, read_frame
from app.runners.preflight import EstimateError, EstimateRequest, EstimateResponse


def main() -> int:
    parent_watch.tie_to_parent()
    message = read_frame(partial(os.read, 0))
    if message is None:
        return 1
    question: EstimateRequest = make_decoder(EstimateRequest).decode(message)
    parent_watch.exit_with_parent(question.parent_pid)
    # This import is slow, so it comes after `exit_with_parent`.
    from app.engine.fit import estimate_memory

    try:
        requirement = estimate_memory(question.files, question.settings, question.loaded_bytes)
        response = EstimateResponse(requirement=requirement)
    except AppError as error:
        response = EstimateResponse(error=EstimateError(kind=error.kind, message=error.message))
    sys.stdout.buffer.write(encode(response))
    return 0


if __name__ == "__main__":
    sys.exit(main())
