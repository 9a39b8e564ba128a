"""The files of a run: the run folder, the ledger and the journal."""

from staleflow.storage.journal import read_journal
from staleflow.storage.ledger import LedgerWriter, read_ledger
from staleflow.storage.resume import ResumeState, resume_state
from staleflow.storage.run_folder import RunFolder

__all__ = [
    "LedgerWriter",
    "ResumeState",
    "RunFolder",
    "read_journal",
    "read_ledger",
    "resume_state",
]
