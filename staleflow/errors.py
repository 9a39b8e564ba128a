"""Every exception staleflow raises on purpose, and who is to blame for each.

::

    StaleflowError
    ├── UserError            the person's input is wrong: one sentence, exit code 2, no traceback
    │   ├── ConfigError      a key, a type, a value or a combination in the config
    │   ├── DataError        an unreadable or unusable data line (file and line named)
    │   └── RunFolderError   output folder unwritable, run name in use, nothing to resume
    ├── ProtocolError        the caller asked for an illegal transition; *nothing was changed*
    ├── RunFailed            the run cannot go on (an actor died for good, a limit ran out): exit code 1
    ├── EngineError          a rollout engine broke; its trajectories go back to the trajectory server
    └── TransportError       a push or pull failed; the reader keeps the version it has

Exit codes of the command line: 0 done; 1 the run failed or staleflow has a bug; 2 the input is
wrong and nothing was started; 3 an audit found violations; 130 stopped by Ctrl-C; 141 the reader of the
output closed it (`| head`).
"""


class StaleflowError(Exception):
    """Base of all errors raised on purpose."""


class UserError(StaleflowError):
    """The person's input is wrong. The message is one sentence: what is wrong, what to do."""


class ConfigError(UserError):
    """A config key, type, value or combination is refused."""


class DataError(UserError):
    """A data source cannot be read or used."""


class RunFolderError(UserError):
    """The run folder cannot be created, is in use, or has nothing to resume."""


class ProtocolError(StaleflowError):
    """An illegal transition was asked for. The state is as it was before the call."""


class RunFailed(StaleflowError):
    """The run cannot continue."""


class EngineError(StaleflowError):
    """A rollout engine failed."""


class TransportError(StaleflowError):
    """Weights could not be pushed or pulled."""


EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_AUDIT_VIOLATION = 3
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
"""128 + SIGPIPE, what a shell says of any command that a closed pipe has ended."""
