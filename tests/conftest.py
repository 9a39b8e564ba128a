"""What every test gets: no network, one thread a process, nothing of the person's environment."""

from __future__ import annotations

import os

# Before anything imports the libraries that read them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    RAY_USAGE_STATS_ENABLED="0",
)
for _name in [name for name in os.environ if name.upper().startswith("STALEFLOW__")]:
    del os.environ[_name]
