"""kill -9 of a real process in the middle of a save: what is found afterwards is whole."""

import os
import signal
import subprocess
import sys
import time

import pytest

from staleflow.training.checkpoints import newest_whole, write_checkpoint

SAVE_FOR_EVER = """
import sys
from itertools import count
from pathlib import Path
from staleflow.training.checkpoints import write_checkpoint

def write(folder):
    for name in ("a.bin", "b.bin", "c.bin"):
        (folder / name).write_bytes(bytes([step % 251]) * 300_000)

for step in count(1):
    write_checkpoint(Path(sys.argv[1]), step, write, keep=2)
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 7, 13, 29])
def test_after_a_kill_the_newest_acknowledged_checkpoint_or_a_later_one_is_whole(tmp_path, delay_ms):
    with subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        for _ in range(3):
            process.stdout.readline()
        time.sleep(delay_ms / 1000)
        os.kill(process.pid, signal.SIGKILL)
        acknowledged = 3 + sum(1 for line in process.stdout if line.endswith("\n"))
    found = newest_whole(tmp_path)
    assert found is not None
    step, folder = found
    assert step in (acknowledged, acknowledged + 1)
    for name in ("a.bin", "b.bin", "c.bin"):
        assert (folder / name).read_bytes() == bytes([step % 251]) * 300_000
    # The next save goes on from there, and sweeps what the killed one left.
    write_checkpoint(tmp_path, step + 1, lambda new: (new / "a.bin").write_text("x"), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [f"step_{step + 1}"]
