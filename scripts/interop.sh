#!/usr/bin/env bash
# Makes (once) an environment with libraries that read through fsspec, and runs tests/interop in it;
# then what leans on fsspec itself with the oldest version that pyproject.toml allows.
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
  # The oldest fsspec, in front of everything else that the environment above has.
  oldest=$(sed -n 's/.*"fsspec>=\([0-9.]*\)".*/\1/p' pyproject.toml)
  "$home/bin/python" -m venv "$home/oldest"
  "$home/oldest/bin/pip" install --quiet "fsspec==$oldest.0"
  site='import sysconfig; print(sysconfig.get_path("purelib"))'
  "$home/bin/python" -c "$site" > "$("$home/oldest/bin/python" -c "$site")/interop.pth"
  echo "$want" > "$home/.stamp"
fi
"$home/bin/python" -m pytest -q -n 0 -p no:cacheprovider \
  -o asyncio_mode=auto tests/interop "$@"
[ $# -eq 0 ] || exit 0
PYTHONPATH=. exec "$home/oldest/bin/python" -m pytest -q -n 0 -p no:cacheprovider \
  tests/fs/test_chains.py tests/fs/test_files.py tests/fs/test_abstract.py tests/fs/test_names.py
