"""Processes that do the jobs of a preparation, and how they and a DataLoader's workers end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from datamodules.errors import DataError

Name = TypeVar("Name")


def run_jobs(
    function: Callable[..., dict[str, Any]], calls: Sequence[tuple[Name, tuple[Any, ...]]], workers: int
) -> Iterator[tuple[Name, dict[str, Any]]]:
    """Yield (name, function(*arguments)) for each (name, arguments), in the order in which they finish.

    After the first error, which is raised as it is, no further job starts. DataError: a worker died.
    """
    if workers == 1 or len(calls) <= 1:
        for name, arguments in calls:
            yield name, function(*arguments)
        return
    # The workers are not forked from this process, which may hold a GPU, threads and locks.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["datamodules.stages", "litdata"])
    pool = ProcessPoolExecutor(min(workers, len(calls)), mp_context=context, initializer=_start_worker)
    try:
        futures = {pool.submit(function, *arguments): name for name, arguments in calls}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most likely because memory ran out. What was finished is kept: run again, "
            "with fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    # The processes already fill the cores; threads inside each would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches the whole process group; the parent ends the pool after the jobs that are running.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End with the parent: a parent that is killed outright cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Not getppid, since the server that forks the workers lives as long as any of them does.
    parent.join()
    os._exit(1)


def leave_signals_to_parent(worker_id: int = 0) -> None:
    """Let a reading process live until its parent ends it (`worker_init_fn` of a DataLoader).

    Ctrl-C and a scheduler's signals reach every process, while the parent needs batches to finish its step. SIGTERM
    is obeyed only if it comes from the parent.
    """
    for signum in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    # Blocked in all threads, so that one of them can wait for the signal and see who sent it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_leave_when_asked_by, args=(parent.pid,), daemon=True).start()
    # torch watches the process that is the parent at the start, which may already be init.
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_when_asked_by(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
