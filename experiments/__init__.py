"""Declared studies of the system: what is run, what is measured, what would count as an answer."""
