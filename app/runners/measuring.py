"""`python -m app.runners.measuring`: what a model needs, told to whoever started this.

Knows: one line in, one line out. Must not know: requests. Lives as long as one measurement.
"""

import sys

from app.core.errors import AppError
from app.engine.fit import need
from app.runners.codec import Codec
from app.runners.needs import Answer, Question, Refused


def main() -> int:
    question = Codec[Question](Question).decode(sys.stdin.buffer.readline())
    try:
        found = need(question.files, question.settings)
    except AppError as error:
        found = Refused(kind=error.kind, message=error.message)
    sys.stdout.buffer.write(Codec[Answer](Answer).encode(Answer(found=found)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
