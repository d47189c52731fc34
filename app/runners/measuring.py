"""`python -m app.runners.measuring`: what a model needs, told to whoever started this.

Knows: one line in, one line out. Must not know: requests. Lives as long as one measurement, and no
longer than whoever asked.
"""

import sys

from app.core.errors import AppError
from app.runners import lifeline
from app.runners.codec import Codec
from app.runners.needs import Answer, Question, Refused


def main() -> int:
    lifeline.tie_to_parent()
    line = lifeline.first_line()
    if not line:
        return 1
    question = Codec[Question](Question).decode(line)
    lifeline.hold(question.parent)
    # takes a while, in which whoever asked may go
    from app.engine.fit import need

    try:
        found = need(question.files, question.settings, question.held)
    except AppError as error:
        found = Refused(kind=error.kind, message=error.message)
    sys.stdout.buffer.write(Codec[Answer](Answer).encode(Answer(found=found)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
