#!/usr/bin/env bash
# The checks that need a CUDA device: `make gpu`, or this script with the python of any environment that has
# kvstrata, pytest and a CUDA build of torch. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONSAFEPATH=1 OMP_WAIT_POLICY=passive

python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "make gpu needs a CUDA device and a CUDA build of torch; 'make test' checks everything else" >&2
  exit 2
}
python -c 'import cupy' 2>/dev/null || {
  echo "set-up: cupy"
  python -m pip install -qq 'cupy-cuda13x>=14'
}
python -c 'import torch; print(torch.cuda.get_device_name(), "with torch", torch.__version__)'
exec python -m pytest -m gpu -ra tests "$@"
