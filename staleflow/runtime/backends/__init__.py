"""Where a run's parts live: one process, Ray actors, or a virtual clock. Each implements `Backend`."""
