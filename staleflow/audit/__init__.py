"""Independent checker of a run's ledger. Standard library only; shares no code with the ledger's writer."""

from staleflow.audit.checker import audit_ledger
from staleflow.audit.report import AuditReport, Violation

__all__ = ["AuditReport", "Violation", "audit_ledger"]
