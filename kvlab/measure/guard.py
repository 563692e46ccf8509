"""The process between a notebook and its server: it starts the server, and ends it whatever happens.

Run as `python guard.py COMMAND...`; the parent holds a pipe to standard input. It prints the server's process
id. When the pipe closes, the parent is gone, SIGTERM comes, or the server itself ends, its whole family
is asked to end and then killed. Exit status: the server's. Linux only.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

GRACE_S, ORPHANS_GRACE_S = 3.0, 0.5
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def start(command):
    """Start the server in a session of its own; its orphans come to this process.

    Should this process be killed, the server is asked to end: killed itself, it would leave its engine behind.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )


def wait(server, parent_pid, asked_to_end):
    """Return when the server has ended, the parent or its pipe is gone, or a signal asked for it."""
    while server.poll() is None and os.getppid() == parent_pid and not asked_to_end:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 1):
            return


def end(server):
    """Ask the server to end, wait a little, then kill all that is left of its family."""
    if server.poll() is None:
        server.terminate()
    until(lambda: server.poll() is not None, GRACE_S)
    until(lambda: not family(), ORPHANS_GRACE_S)
    while remaining := family():
        for process in remaining:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(remaining, timeout=1)
    return server.wait()


def until(condition, timeout_s):
    """Wait for the condition, at most so long."""
    ends_at_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < ends_at_s:
        time.sleep(0.02)


def family():
    """Living processes below this one: the server, its children, and orphans they left."""
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except psutil.NoSuchProcess:
            pass
    return living


def main(command):
    parent_pid, asked_to_end = os.getppid(), []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: asked_to_end.append(True))
    server = start(command)
    print(server.pid, flush=True)
    wait(server, parent_pid, asked_to_end)
    status = end(server)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
