"""What a person sees when a command fails: one sentence and an exit code, never a traceback by surprise."""

from __future__ import annotations

import functools
import os
import select
import sys
import tempfile
import traceback
from collections.abc import Callable

import typer

from staleflow.errors import (
    EXIT_CLOSED_PIPE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    RunFailed,
    UserError,
)


def says_what_went_wrong(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turn a command's errors and its returned exit code into the process's exit code.

    With `debug` among the command's arguments set, the traceback is shown as well. Where nobody reads the
    output any more, nothing is said.
    """

    @functools.wraps(command)
    def wrapped(*args: object, **kwargs: object) -> None:
        debug = bool(kwargs.get("debug"))
        try:
            code = command(*args, **kwargs) or 0
            sys.stdout.flush()  # here, and not at the interpreter's end, where it could only complain
        except UserError as error:
            code = _fail(str(error), EXIT_USER_ERROR, debug)
        except RunFailed as error:
            code = _fail(f"the run failed: {error}", EXIT_FAILED, debug)
        except KeyboardInterrupt:
            code = _fail("stopped", EXIT_INTERRUPTED, debug)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                code = EXIT_CLOSED_PIPE
            else:
                code = _fail(f"{_one_line(error)}{'' if debug else _traceback_place()}", EXIT_FAILED, debug)
        raise typer.Exit(code)

    return wrapped


def _nobody_reads() -> bool:
    """Whether it is the output whose pipe is closed. What is left of it then goes nowhere, silently."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # it is no file
        return False
    poll = select.poll()
    poll.register(output, 0)
    if not poll.poll(0):  # asked for nothing, it tells of errors and of a closed other end
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"staleflow: {message}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _traceback_place() -> str:
    """Write the traceback aside and say where."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="staleflow-", suffix=".log", delete=False, encoding="utf-8"
        ) as log:
            traceback.print_exc(file=log)
    except OSError:
        return " (--debug shows the traceback)"
    return f" (traceback in {log.name}; --debug shows it here)"
