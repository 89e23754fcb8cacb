"""Replaces itself by a program that cannot outlive its parent: drops the uid, requests a parent-death signal, then execs.

Run as a script with `python -I -S`, never imported by the server. Invariant: the signal is requested after the uid
change, which clears it. The parent is checked after the request, so that a parent that is already dead ends this process too.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
PARENT_GONE = 75


def main(arguments: list[str]) -> None:
    """`PARENT_PID SIGNAL UID GID PROGRAM ARG…`; UID -1 keeps the caller's user."""
    parent_pid, death_signal, uid, gid = (int(value) for value in arguments[:4])
    command = arguments[4:]
    libc = ctypes.CDLL(None, use_errno=True)
    if uid >= 0:
        os.fchown(0, uid, gid)  # so that the program may reopen its input as /proc/self/fd/0
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    os.umask(0o077)
    if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(PARENT_GONE)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
