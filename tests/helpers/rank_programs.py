"""Programs of ranks that end as a script does: by Python's own end of the main script, or by a signal.

All are forked from one process, which has imported what they need.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_TOP = Path(__file__).parents[2]
_MAIN = """
import gc, os, socket, sys
asks = socket.socket(fileno=int(sys.argv[1]))
for name in sys.argv[2:]:
    __import__(name)
gc.collect()
gc.freeze()  # no collection of garbage looks at it again
asks.send(b"ready")
while True:
    program, given, *_ = socket.recv_fds(asks, 2**17, 16)
    if not program:
        os._exit(0)
    if program.startswith(b"wait "):
        asks.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(int(program[5:]), 0)[1]))
        continue
    child = os.fork()
    if child == 0:
        asks.close()
        for place, each in enumerate(given[:3]):
            os.dup2(each, place)
            os.close(each)
        break
    for each in given:
        os.close(each)
    asks.send(b"%d" % child)
FILES = given[3:]
exec(compile(program.decode(), "<program>", "exec"), globals())
"""


class Program:
    """One that runs."""

    def __init__(self, of: Programs, pid: int, files: list[Any]) -> None:
        self.of, self.pid, self.is_over = of, pid, False
        self.stdin, self.stdout, self.stderr = files

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self, within_s: float) -> int:
        """Its exit status; negative for a signal. TimeoutError if it has not ended in time; it is killed then."""
        self.of.asks.settimeout(within_s)
        self.of.asks.send(b"wait %d" % self.pid)
        self.is_over = True
        try:
            return int(self.of.asks.recv(100))
        except TimeoutError:
            self.kill()
            self.of.asks.recv(100)
            raise

    def ended(self, within_s: float, text: str = "") -> tuple[int, str, str]:
        """Give it a text as its input; its exit status, and what else it has written."""
        with suppress(BrokenPipeError):
            self.stdin.write(text)
            self.stdin.close()
        return self.wait(within_s), self.stdout.read(), self.stderr.read()


class Programs:
    """Starts them. At its end, those that run are killed."""

    def __init__(self, *modules: str) -> None:
        self.asks, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(str(each) for each in (_TOP, _TOP / "tests" / "helpers"))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(there.fileno()), *modules],
            pass_fds=[there.fileno()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        there.close()
        self._programs: list[Program] = []
        assert self.asks.recv(100) == b"ready"

    def start(self, program: str, sockets: tuple[socket.socket, ...] = ()) -> Program:
        """Run a program; FILES has the descriptors of `sockets` there, which are closed here."""
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self.asks.settimeout(60)
        socket.send_fds(self.asks, [program.encode()], [*theirs, *(each.fileno() for each in sockets)])
        pid = int(self.asks.recv(100))
        for each in theirs:
            os.close(each)
        for each in sockets:
            each.close()
        files = [open(pipes[0][1], "w"), open(pipes[1][0]), open(pipes[2][0])]
        self._programs.append(Program(self, pid, files))
        return self._programs[-1]

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._programs:
            if not each.is_over:
                each.kill()
                each.wait(30)
            for file in (each.stdin, each.stdout, each.stderr):
                with suppress(BrokenPipeError):
                    file.close()
        self.asks.close()
        self._process.wait(30)
