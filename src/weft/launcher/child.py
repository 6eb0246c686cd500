"""The process-rank's own side: one interpreter, one loop, one job after another.

A job gets a fresh default group over a store that the launcher hosts, so that it
outlives any rank; each job has a corner of that store, so that jobs never mix.
Process-wide state that user code changes (modules, default dtype, environment)
stays from job to job; the random generators start each job from the seed of a
fresh process.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import wait as wait_readable

import torch

from weft.launcher.backends import prepare_nccl, uses_nccl
from weft.launcher.payload import decode_call, encode_exception, encode_result, publish_main
from weft.launcher.report import exception_failure
from weft.launcher.stacks import DUMP_SIGNAL
from weft.launcher.stores import connect_store, corner_of
from weft.launcher.wire import (
    Failed,
    Idle,
    Job,
    Meet,
    Message,
    Ready,
    Returned,
    encode_message,
    receive_message,
)
from weft.launcher.world import abort_groups, destroy_groups, init_default_group
from weft.rank_thread import end_rank
from weft.trust import JobSecret, enter_world, install_secret

# A rank that has returned keeps its groups this long for peers that are about to return too:
# closing a connection discards what the peer has not read yet. Not longer, so that a peer that
# waits for this rank in vain learns it from the closed group and not from its timeout.
LINGER_SECS = 1.0


def main(argv: list[str]) -> None:
    """Run as one rank until the launcher hangs up. The arguments are RankProcess's."""
    rank, num_ranks, control_fd, lifeline_fd, stacks_fd = map(int, argv)
    die_with_launcher(lifeline_fd)
    for fd in (control_fd, lifeline_fd, stacks_fd):
        os.set_inheritable(fd, False)
    faulthandler.enable(stacks_fd)
    faulthandler.register(DUMP_SIGNAL, stacks_fd)
    # Line by line, so that a rank that is killed has said what it had to say.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    child = RankChild(rank, num_ranks, socket.socket(fileno=control_fd))
    # What start-up has made is never garbage: leaving it out makes the collection after each job cheap.
    gc.collect()
    gc.freeze()
    child.serve()


def die_with_launcher(lifeline_fd: int) -> None:
    """See to it that this process and those that it starts end when the pipe's other end is closed.

    On Linux the kernel does it, by sending SIGKILL in place of SIGIO: that also ends a rank
    that is stopped, or in a native call that holds the interpreter lock. PR_SET_PDEATHSIG is
    no alternative: it fires when the launcher's *thread* ends, which a pool outlives, and
    spares the rank's own children. The signal goes to the rank's process group, so it reaches
    all of them but those that left the group, such as daemons.
    """
    # A rank leads its group from the start; a process that does not must not end its neighbours.
    owner = -os.getpid() if os.getpgrp() == os.getpid() else os.getpid()
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, owner)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        # The launcher may have gone while this interpreter was starting.
        if wait_readable([lifeline_fd], 0.0):
            os._exit(1)
    else:

        def exit_at_end_of_pipe() -> None:
            os.read(lifeline_fd, 1)
            os.kill(owner, signal.SIGKILL)  # of a group, where the number is negative

        threading.Thread(target=exit_at_end_of_pipe, daemon=True).start()


class RankChild:
    """The loop over jobs, and what lives as long as the process."""

    def __init__(self, rank: int, num_ranks: int, control: socket.socket) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._control = control
        self._fresh_seed = torch.initial_seed()
        self._excepthook = sys.excepthook

    def serve(self) -> None:
        """Serve jobs until the launcher hangs up."""
        meet = receive_message(self._control)
        if not isinstance(meet, Meet):
            return  # the launcher has given up
        self._secret = JobSecret(meet.secret)
        self._is_secret_given = meet.is_given
        install_secret(self._secret)
        self._store = connect_store(meet.store_port)
        self._send(Ready())
        while (message := receive_message(self._control)) is not None:
            # A Finish here came after this rank had stopped waiting for it.
            if isinstance(message, Job):
                self._serve_job(message)
                self._send(Idle())

    def _serve_job(self, job: Job) -> None:
        try:
            self._enter_job(job)
            self._send(Returned(self._run(job)))
            self._linger()
        except BaseException as exception:
            self._fail(exception)
        end_rank()
        destroy_groups()
        sys.excepthook = self._excepthook  # init_process_group wraps it, and nothing ever unwraps it
        # Groups and shared memory in reference cycles must not live on into the next job.
        gc.collect()

    def _enter_job(self, job: Job) -> None:
        sys.path[:] = job.sys_path
        sys.argv[:] = job.argv
        if os.getcwd() != job.working_dir:
            os.chdir(job.working_dir)
        os.environ["MASTER_PORT"] = str(job.master_port)
        enter_world(job.store_corner)
        if not self._is_secret_given:
            # Values of earlier jobs can be replayed in the store; sealed with another secret they are void.
            install_secret(self._secret.derive_secret(job.store_corner))
        torch.manual_seed(self._fresh_seed)

    def _run(self, job: Job) -> bytes:
        timeout = timedelta(seconds=job.collective_timeout_secs)
        fn, args, kwargs = decode_call(job.call)
        publish_main(fn)
        corner = corner_of(self._store, job.store_corner, timeout)
        num_gpus = torch.cuda.device_count()
        if uses_nccl(job.backend) and num_gpus > 0:
            # Before the group is made: nccl binds to the current device.
            torch.cuda.set_device(self._rank % num_gpus)
            shares_gpu = self._num_ranks > num_gpus
            prepare_nccl(job.backend, self._rank, shares_gpu=shares_gpu, is_one_host=True)
        init_default_group(job.backend, corner, self._rank, self._num_ranks, timeout)
        try:
            result = fn(*args, **kwargs)
        except SystemExit as exit_request:
            if exit_request.code not in (None, 0):
                raise
            result = None
        return encode_result(result, self._rank)

    def _fail(self, exception: BaseException) -> None:
        """Tell the peers and the launcher. Keeps nothing: the exception's frames hold the user's tensors."""
        failure = exception_failure(self._rank, exception, time.monotonic())
        abort_groups(failure.headline)
        self._send(
            Failed(
                headline=failure.headline,
                report=failure.report,
                exception=encode_exception(exception),
                is_consequence=failure.is_consequence,
                at_secs=failure.at_secs,
            )
        )
        end_rank(failure.headline)

    def _linger(self) -> None:
        """Wait for Finish, which is all that can come now, or for the end of patience."""
        if wait_readable([self._control], LINGER_SECS):
            receive_message(self._control)

    def _send(self, message: Message) -> None:
        self._control.sendall(encode_message(message))
