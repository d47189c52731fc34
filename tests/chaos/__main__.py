"""`python -m tests.chaos --minutes 10`: five models that do not fit together, clients that
disconnect, and runners that are killed, stopped and out of memory, while the disk is full."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.checks import find_violations
from tests.chaos.questions import compute_answers, make_questions, write_models
from tests.chaos.run import run_chaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root, questions = Path(folder), make_questions(args.prompts, args.seed)
        write_models(root)
        expected = compute_answers(root, questions)
        report = run_chaos(
            root,
            questions,
            seconds=60 * args.minutes,
            clients=args.clients,
            pause=(0.3, 1.5),
            seed=args.seed,
        )
    if args.log is not None:
        args.log.write_text(report.log)
    print(f"requests {report.counts()}")
    print(f"faults {dict(report.faults)}")
    durations = sorted(outcome.seconds for outcome in report.outcomes)
    print(f"seconds, median {durations[len(durations) // 2]:.2f}, longest {durations[-1]:.1f}")
    print(f"before {report.before}\nafter {report.after}")
    messages = Counter(
        outcome.message for outcome in report.outcomes if outcome.message is not None
    )
    for message, count in messages.most_common():
        print(f"{count:6} {' '.join(message.split())}")
    violations = find_violations(report, expected)
    for violation in violations:
        print(f"WRONG: {violation}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
