"""What a person sees when a command fails: one sentence and an exit code, and a traceback on request."""

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

    With `debug` among the command's arguments set, the traceback is printed too. When the output's pipe is
    closed, nothing is printed.
    """

    @functools.wraps(command)
    def wrapped(*args: object, **kwargs: object) -> None:
        debug = bool(kwargs.get("debug"))
        try:
            code = command(*args, **kwargs) or 0
            sys.stdout.flush()  # here: at the interpreter's end an error could not be handled any more
        except UserError as error:
            code = _fail(str(error), EXIT_USER_ERROR, debug)
        except RunFailed as error:
            code = _fail(f"the run failed: {error}", EXIT_FAILED, debug)
        except KeyboardInterrupt:
            code = _fail("stopped", EXIT_INTERRUPTED, debug)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _output_is_closed():
                code = EXIT_CLOSED_PIPE
            else:
                code = _fail(f"{_one_line(error)}{'' if debug else _traceback_place()}", EXIT_FAILED, debug)
        raise typer.Exit(code)

    return wrapped


def _output_is_closed() -> bool:
    """Whether the pipe of the output is closed. The rest of the output then goes to the null device."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # it is not a file
        return False
    poll = select.poll()
    poll.register(output, 0)
    if not poll.poll(0):  # with an empty mask it reports errors and a closed reader only
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
    """Write the traceback to a file; returns the words that name the file."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="staleflow-", suffix=".log", delete=False, encoding="utf-8"
        ) as log:
            traceback.print_exc(file=log)
    except OSError:
        return " (--debug shows the traceback)"
    return f" (traceback in {log.name}; --debug shows it here)"
