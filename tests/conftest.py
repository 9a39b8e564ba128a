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

from hypothesis import settings  # noqa: E402

# Slow machines are no bug; and what lands is judged on the same examples each time: new ones are looked for
# where somebody can look at what they find.
settings.register_profile("staleflow", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("staleflow")
