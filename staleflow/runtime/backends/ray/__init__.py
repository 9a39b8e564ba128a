"""The Ray backend: every part is an actor."""
