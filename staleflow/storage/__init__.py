"""What a run leaves on disk: the run folder and the ledger file."""

from staleflow.storage.ledger import LedgerWriter, read_ledger
from staleflow.storage.resume import ResumeState, resume_state
from staleflow.storage.run_folder import RunFolder

__all__ = ["LedgerWriter", "ResumeState", "RunFolder", "read_ledger", "resume_state"]
