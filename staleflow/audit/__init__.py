"""Independent checker of a run's ledger. Standard library only; shares no code with what writes ledgers."""

from staleflow.audit.checker import audit_ledger
from staleflow.audit.report import AuditReport, Violation

__all__ = ["AuditReport", "Violation", "audit_ledger"]
