"""A run that a signal ended: what it left, its exit status, and the way back into the queue.

Only the standard library is imported here: the command line needs this before torch is loaded.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

EXIT_STATUS = 75
"""Exit status of a run that a signal stopped and that can go on (EX_TEMPFAIL of sysexits.h: try again later)."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler is asked to send before the time is up (`sbatch --signal=USR1@120`). SIGTERM is not among them:
SLURM sends it on `scancel`, when nobody wants the job back, and when SLURM requeues the job itself."""


class Preempted(SystemExit):
    """A signal stopped the run. Uncaught, it ends the process with EXIT_STATUS and without a traceback.

    Only rank zero reports EXIT_STATUS: a launcher kills the other processes as soon as one of them fails.

    Args:
        signum: the signal.
        step: optimizer steps done; None before training began.
        checkpoint: where these steps are saved; None if there was nothing to save.
        rank: rank of this process.
    """

    def __init__(
        self, signum: int, step: int | None = None, checkpoint: str | None = None, rank: int = 0
    ) -> None:
        super().__init__(EXIT_STATUS if rank == 0 else 0)
        self.signum, self.step, self.checkpoint, self.rank = signal.Signals(signum), step, checkpoint, rank

    def __str__(self) -> str:
        if self.step is None:
            return f"stopped by {self.signum.name} before training began; there was nothing to save."
        if self.checkpoint is None:
            return f"stopped by {self.signum.name} after step {self.step}; there was nothing to save."
        return f"stopped by {self.signum.name} after step {self.step}, saved in {self.checkpoint}."

    @property
    def wants_requeue(self) -> bool:
        """Whether the run should go back into the queue."""
        return self.signum in REQUEUE_SIGNALS and self.rank == 0


def requeue_job() -> str | None:
    """Ask SLURM to run this job again; the outcome in words, or None outside a job."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        # A task is named by the array's id and its own: `SLURM_JOB_ID` differs from task to task, and the array's id
        # alone would requeue all of them.
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        asked = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except OSError as error:
        return f"SLURM job {job} is not requeued: scontrol cannot be run ({error})."
    if asked.returncode:
        return f"SLURM job {job} is not requeued: {(asked.stderr or asked.stdout).strip()}."
    return f"SLURM job {job} is requeued."


@contextmanager
def answered(signals: Iterable[signal.Signals], answer: Callable[[int], None]) -> Iterator[None]:
    """Call `answer` on signals to this process, not to forked children. No effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            answer(signum)
        else:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    before: dict[int, Any] = {s: signal.signal(s, handle) for s in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def stopped_before_training() -> AbstractContextManager[None]:
    """Until training installs its own handlers, SIGTERM and the requeue signals raise Preempted.

    A scheduler must learn that the run wants to start again. SIGINT stays Python's KeyboardInterrupt.
    """

    def stop(signum: int) -> None:
        raise Preempted(signum)

    return answered((signal.SIGTERM, *REQUEUE_SIGNALS), stop)


def report(stop: Preempted) -> int:
    """Tell how a stopped run can go on, requeue it if wanted, and return its exit status."""
    if stop.rank == 0:
        lines = [str(stop)]
        if stop.checkpoint is not None:
            lines += [f"Go on with the same command and --resume auto, or with --ckpt_path {stop.checkpoint}"]
        lines += [requeue_job() or ""] if stop.wants_requeue else []
        print("\n".join(filter(None, lines)), file=sys.stderr, flush=True)
    return int(stop.code or 0)
