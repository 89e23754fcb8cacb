"""Entry point of every worker process: `python -m loraplex.platform.workers.main NAME`, started through standard input.

Invariant: it imports its task's module only, and confines itself before it reads a payload. NAME is for `ps`.
"""

import gc
import os
import signal
from typing import Final

from loraplex.platform.processes.parent_death import die_with_parent
from loraplex.platform.workers.fork_server import ForkServer
from loraplex.platform.workers.messages import (
    MessageReader,
    Ready,
    Report,
    Start,
    Unavailable,
    decode_job,
    decode_start,
    encode,
    write_message,
)
from loraplex.platform.workers.process_end import MEMORY_STATUS
from loraplex.platform.workers.sandbox import (
    close_descriptors_but,
    discard_output,
    enter,
    lower_priority,
    threads,
)
from loraplex.platform.workers.task_function import TaskFunction, load_function

ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
"""A system-call filter applies to one thread, and a lock that another thread has stays locked in a fork. No device either."""


def main() -> None:
    """Set up, then run jobs until standard input ends."""
    # A signal to all of a server's processes must not end this one: its parent may still need it, and ends it.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)
    requests = MessageReader(0)
    message = requests.next()
    if message is None:
        return
    start = decode_start(message)
    die_with_parent(start.parent_pid)
    close_descriptors_but({replies, *start.descriptors})
    os.environ |= ONE_THREAD
    task = TaskFunction(load_function(start.function, start.setup), start.refusals)
    gc.collect()
    gc.freeze()
    if start.forks:
        serve_by_forks(task, start, requests, replies)
    else:
        serve(task, start, requests, replies)


def serve_by_forks(task: TaskFunction, start: Start, requests: MessageReader, replies: int) -> None:
    """Run each job in a fork of this process, which must have one thread."""
    if threads() != 1:
        raise RuntimeError(f"{threads()} threads after the start: a fork could hang on a lock")
    # The start runs at full priority, once; jobs must not compete with engines.
    lower_priority(start.sandbox.niceness)
    write_message(replies, encode(Ready()))
    ForkServer(task, start, lambda report: write_message(replies, encode(report))).serve(requests)


def serve(task: TaskFunction, start: Start, requests: MessageReader, replies: int) -> None:
    """Confine this process and run jobs in it, one after the other."""
    try:
        discard_output(1, 2)
        enter(start.sandbox, start.parent_pid)
    except (OSError, ValueError) as error:
        return write_message(replies, encode(Unavailable(str(error))))
    status = 1
    try:
        write_message(replies, encode(Ready()))
        while (message := requests.next()) is not None:
            job = decode_job(message)
            write_message(replies, encode(Report(job.job_id, task(job.payload))))
        status = 0
    except MemoryError:
        status = MEMORY_STATUS
    finally:
        # Skip the interpreter's shutdown, which would process untrusted data once more.
        os._exit(status)


if __name__ == "__main__":
    main()
