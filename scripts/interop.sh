#!/usr/bin/env bash
# Makes (once) an environment with libraries that read through fsspec, and runs tests/interop in it.
set -euo pipefail
cd "$(dirname "$0")/.."
home=${MOONCAKE_CACHE:-$HOME/.cache/mooncake}/interop
want=$(cat pyproject.toml scripts/interop.sh scripts/constraints.txt | sha256sum | cut -d' ' -f1)
if [ ! -f "$home/.stamp" ] || [ "$(cat "$home/.stamp")" != "$want" ]; then
  echo "interop: making $home (large downloads the first time)"
  [ -x "$home/bin/python" ] || "${PYTHON:-.venv/bin/python}" -m venv "$home"
  pip() { "$home/bin/pip" install --quiet -c scripts/constraints.txt "$@"; }
  pip torch
  # zarr's own tests override fixtures in a way that pytest 9 stumbles over.
  pip -e ".[dev]" zarr pandas pyarrow safetensors 'dask[array]' duckdb s3fs 'moto[server,s3]'
  "$home/bin/pip" install --quiet 'pytest<9'
  echo "$want" > "$home/.stamp"
fi
exec "$home/bin/python" -m pytest -q -n 0 -p no:cacheprovider \
  -o asyncio_mode=auto tests/interop "$@"
