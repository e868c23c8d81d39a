#!/usr/bin/env bash
# Makes .venv; a second run costs milliseconds. `setup.sh` is what the store needs, `setup.sh torch`
# adds torch for serving and the tensor tests (it is large, so the store does without), and
# `setup.sh docs` what makes a site of the documents.
# System packages are installed when root, and named otherwise. PYTHON= chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-base}
stamp=.venv/.setup-stamp-$extra
want=$(cat pyproject.toml scripts/setup.sh scripts/constraints.txt | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi

python=${PYTHON:-}
for candidate in python3.13 python3.12 python3.11 python3; do
  [ -n "$python" ] && break
  command -v "$candidate" >/dev/null || continue
  "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && python=$candidate
done
missing=()
[ -n "$python" ] || missing+=(python3)
[ -n "$python" ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null && missing+=(python3-venv)
command -v gcc >/dev/null || missing+=(gcc)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing system packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
    python=${python:-python3}
  else
    echo "setup: install these system packages, then run this again: ${missing[*]}" >&2
    exit 1
  fi
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: Python 3.11 or newer is needed, not $("$python" --version);" \
    "set PYTHON=/path/to/python3.11" >&2
  exit 1
}

# What some tests run against; without it those tests say so and are skipped.
if [ "$extra" = torch ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  needs=()
  command -v fusermount3 >/dev/null || needs+=(fuse3)
  command -v rsync >/dev/null || needs+=(rsync)
  command -v git >/dev/null || needs+=(git)
  command -v etcd >/dev/null || needs+=(etcd-server)
  if [ ${#needs[@]} -gt 0 ]; then
    echo "setup: installing packages for tests: ${needs[*]}"
    # RUNLEVEL=1 keeps the packages from starting them: tests start their own.
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends \
      "${needs[@]}" >/dev/null || echo "setup: could not; the tests of these will be skipped"
  fi
fi

echo "setup: making .venv with $("$python" --version)"
# One that a Ctrl-C left half made has no pip, and is made anew.
.venv/bin/python -c 'import pip' 2>/dev/null || "$python" -m venv --clear .venv
pip() { .venv/bin/pip install --quiet --disable-pip-version-check -c scripts/constraints.txt "$@"; }
[ "$extra" = torch ] && pip torch transformers -e ".[serve]"
[ "$extra" = docs ] && pip -e ".[docs]"
pip -e ".[dev]"
echo "setup: compiling the kernels, once"
.venv/bin/mooncake warmup
# What has torch has the base as well.
for done in base "$extra"; do echo "$want" > ".venv/.setup-stamp-$done"; done
