"""The process that holds vLLM: `python -m staleflow.rollout.vllm.host <pipe> <lifeline>` (file descriptors).

Invariants: it executes messages in order; when its owner ends, for whatever reason, it ends with every
process of its group, because the kernel then closes the other end of the lifeline. The owner chooses where
its output and that of its children goes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from staleflow.errors import TransportError, UserError
from staleflow.rollout.vllm.group import kill_group
from staleflow.rollout.vllm.messages import (
    Add,
    Broken,
    Close,
    DecodeStep,
    EngineSetup,
    Ready,
    Refused,
    Remove,
    Removed,
    Updated,
    WeightUpdate,
)


def main(pipe: int, lifeline: int) -> None:
    """Serve the owner at the other end of `pipe`."""
    threading.Thread(target=_end_with_owner, args=(lifeline,), daemon=True).start()
    owner: Connection = Connection(pipe)
    try:
        serve(owner)
    except (EOFError, BrokenPipeError):
        pass  # the owner has ended
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            owner.send(Broken(reason=f"{type(error).__name__}: {_one_line(error)}"))
    sys.stdout.flush()
    sys.stderr.flush()
    end_group()


def serve(owner: Connection) -> None:
    """Build the engine of the first message, then execute messages until Close."""
    setup: EngineSetup = owner.recv()
    from staleflow.rollout.vllm.core import Core

    def worker_died() -> None:
        with contextlib.suppress(OSError):
            owner.send(Broken(reason="a vLLM worker process died"))
        end_group()

    try:
        core = Core(setup, worker_died)
    except UserError as error:
        owner.send(Refused(reason=str(error), blame_user=True))
        return
    owner.send(Ready(kv_capacity=core.kv_capacity, max_model_len=core.max_model_len))
    while True:
        message = owner.recv()
        match message:
            case DecodeStep():
                owner.send(core.step())
            case Add():
                core.add(message)
            case Remove():
                core.remove(message.numbers)
                if message.answer:
                    owner.send(Removed())
            case WeightUpdate():
                try:
                    for stepped in core.update(message.weights, message.on_pull):
                        owner.send(stepped)
                except TransportError as failure:
                    owner.send(Refused(reason=str(failure)))
                else:
                    owner.send(Updated())
            case Close():
                core.close()
                return


def _end_with_owner(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written, so this returns when the other end is closed
    end_group()


def end_group() -> None:
    """End this process and all processes of its group."""
    if os.getpgid(0) == os.getpid():
        kill_group(os.getpid())
    os._exit(1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
