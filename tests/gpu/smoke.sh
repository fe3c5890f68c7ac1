#!/usr/bin/env bash
# Under 6 minutes on one GPU, on a machine that has torch, lightning and transformers but neither vllm nor ray:
# update speed and memory, chunked log-probs, FSDP2 on one device, and the whole loop with the transformers replica inline.
# Prints one JSON object per part. `tests/gpu/smoke.sh --small` is the same on a CPU with tiny sizes, to try the script itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec timeout 360 python3 tests/gpu/smoke.py "$@"
