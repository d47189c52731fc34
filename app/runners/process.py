"""A runner whose engine lives in a process of its own.

Knows: the process, the line to it, the desk, the vigil. Must not know: tensors, text, how the
process does what it is asked. Nothing is evaluated here; token ids, numbers and words cross.

One task owns the process from its beginning to its end: `_live`. However that end comes, everybody
who waits for something is told by the desk, and everything that was opened is closed.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import assert_never

from app.core.embeddings import EmbedJob
from app.core.errors import AppError, Kind
from app.core.files import ModelFiles
from app.core.jobs import Job, Step
from app.core.messages import Failed, Heartbeat, Loading, Ready
from app.core.ports import RunnerStatus
from app.core.settings import Settings
from app.runners import wire
from app.runners.desk import STOPPED, Desk, Waiting
from app.runners.spawned import Spawned
from app.runners.vigil import Vigil
from app.runners.wire import Joiner, MoreScores, News, Opening

log = logging.getLogger(__name__)

# seconds between two looks at a model that is being loaded
_POLL = 0.1

# seconds that a process which has hung up may take to end
_DYING = 2.0
