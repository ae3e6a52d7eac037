"""Runs a command that must not outlive the process that asked for it: `python -m vllm_mtpc.engine.parent COMMAND ...`.

An engine is several processes, and a replica of Ray Serve can be killed without a chance to end any of them. Standard
input is a pipe from the asking process: when it ends, by whatever death, the command's whole process group is ended.
Should this process be killed instead, Linux tells the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from vllm_mtpc.engine.process import end_group

GRACE_S = 5.0


def main(command: list[str]) -> int:
    on_start = _end_with_parent if sys.platform == "linux" else None
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=on_start)
    signal.signal(signal.SIGTERM, lambda *_: _end(child))
    threading.Thread(target=_watch_parent, args=(child,), daemon=True).start()
    code = child.wait()
    end_group(child.pid, signal.SIGKILL)  # an engine may outlive its front-end
    return code if code >= 0 else 128 - code


def _watch_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Asks the group to end, and kills it where it does not."""
    end_group(child.pid, signal.SIGTERM)
    killer = threading.Timer(GRACE_S, end_group, (child.pid, signal.SIGKILL))
    killer.daemon = True
    killer.start()


def _end_with_parent() -> None:
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
