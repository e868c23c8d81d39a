# Everything a developer runs. `make setup` happens by itself where it is needed.
PY := .venv/bin/python
SEED ?= 1
SEEDS ?= 1
MINUTES ?= 10
SECONDS ?= 1800
SITE ?= build/site
PREVIOUS ?= HEAD~1
# Many images set it: each of the hundreds of processes below would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-test setup-docs demo test check bench docs fuzz soak soak-store chaos clean
.PHONY: predictions test-mount test-interop test-gpu test-vllm test-sglang test-lmcache test-rdma
.PHONY: test-compat test-hosts test-serving soak-serving soak-reboot soak-standby upgrade
.PHONY: abuse crowd overload conversations vllm-routing package-check deploy-check sweeps

help:            ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

setup:           ## make .venv with everything the other targets need
	@scripts/setup.sh

setup-test:      ## setup, and torch for the tensor tests
	@scripts/setup.sh torch

setup-docs:      ## setup, and what makes the site of the documents
	@scripts/setup.sh docs

demo: setup-test ## run the main jobs on embedded defaults and say what they did
	@.venv/bin/mooncake warmup
	@$(PY) -m mooncake_store.demo
	@$(PY) -m serving.demo

test: setup-test ## the default suite (some 20 minutes on two cores)
	@.venv/bin/mooncake warmup
	@$(PY) -m pytest -n auto --dist worksteal

sweeps: setup-test ## tests over many seeds, of which the default suite has the first, over all
	@.venv/bin/mooncake warmup
	@MOONCAKE_TEST_SWEEPS=1 $(PY) -m pytest -n auto --dist worksteal -m sweep

test-hosts: setup-test ## members on hosts of their own, 20 schedules of partitions; needs root
	@MOONCAKE_TEST_SEEDS=20 $(PY) -m pytest -n 0 tests/hosts

test-rdma: setup-test ## RDMA, NVMe-oF and dax, for real, in a virtual machine
	@$(PY) -m tests.rdma.vm

deploy-check: setup ## units, images and manifests of deploy/ before the tools that judge them
	@$(PY) -m tests.deploy.check
	@$(PY) -m tests.deploy.check_metrics || [ $$? -eq 77 ]

test-compat: setup-test ## the drop-in beside the original, and the original's own tests on it
	@$(PY) scripts/compat_check.py

check: setup-test ## ruff, format, mypy --strict, import contracts, tidy test
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@$(PY) -m pytest -q tests/test_tidy.py tests/ground/test_reference.py

package-check: setup ## sdist and wheel: built, compared with git, installed alone, and used there
	@$(PY) -m tests.packaging.check

bench: setup     ## every benchmark, quickly
	@.venv/bin/mooncake bench all --quick

docs: setup-docs ## write anew what is generated (docs/reference, ...), then the site: build/site
	@$(PY) scripts/cli_reference.py
	@$(PY) -m scripts.man_pages
	@$(PY) scripts/store_reference.py
	@$(PY) scripts/http_reference.py
	@$(PY) scripts/metrics_reference.py
	@$(PY) scripts/async_client.py
	@$(PY) scripts/wire_promises.py
	@$(PY) scripts/notebook.py
	@$(PY) scripts/deploy_rules.py
	@$(PY) -m scripts.docs_site $(SITE)

test-gpu: setup-test ## device memory on a real CUDA device; skips with a reason where none is
	@$(PY) -m pytest -n 0 -m gpu tests/transfer tests/serving tests/vllm

fuzz: setup      ## hostile bytes for the codec and every port, requests of HTTP: SECONDS (1800)
	@.venv/bin/mooncake warmup
	@$(PY) -m tests.fuzz.wire --seconds $$(( $(SECONDS) / 6 ))
	@$(PY) -m tests.fuzz.ports --seconds $$(( $(SECONDS) * 4 / 6 ))
	@$(PY) -m tests.fuzz.described --seconds $$(( $(SECONDS) / 6 ))

crowd: MINUTES := $(if $(filter file,$(origin MINUTES)),5,$(MINUTES))
crowd: setup     ## one client beside idle, busy and hostile ones, for MINUTES (5)
	@.venv/bin/mooncake warmup
	@$(PY) -m tests.soak.crowd --minutes $(MINUTES)

abuse: setup     ## every port of a running pool, against whoever wants to stop or fill it
	@.venv/bin/mooncake warmup
	@$(PY) -m tests.soak.abuse

soak: setup      ## the shard core against its model, 100,000 steps of SEED
	@$(PY) -m tests.soak.core --seed $(SEED)

soak-store: setup ## a running store under load, kills and stops, for MINUTES (10)
	@$(PY) -m tests.soak.store --minutes $(MINUTES) --seed $(SEED)

chaos: MINUTES := $(if $(filter file,$(origin MINUTES)),15,$(MINUTES))
chaos: setup     ## processes killed, hosts cut off, nothing lost: MINUTES (15) of SEEDS (1) seeds
	@.venv/bin/mooncake warmup
	@$(PY) -m tests.soak.chaos --minutes $(MINUTES) --seed $(SEED) --seeds $(SEEDS)

soak-reboot: setup ## a host that is started anew, with a million objects on its disk
	@$(PY) -m tests.soak.reboot

soak-standby: setup ## a leader and its standby, killed and promoted, for MINUTES (10)
	@$(PY) -m tests.soak.standbys --minutes $(MINUTES) --seed $(SEED)

upgrade: setup   ## a pool of PREVIOUS (HEAD~1) that is upgraded under load, and back
	@$(PY) -m tests.soak.upgrade --previous $(PREVIOUS) --seed $(SEED)

soak-serving: setup-test ## workers of a serving system, killed 20 times under load
	@$(PY) -m tests.soak.serving --kills 20 --seed $(SEED)

overload: setup-test ## twice what a serving system can do, under each admission policy
	@$(PY) -m tests.soak.overload --seconds 60 --seed $(SEED)

conversations: setup-test ## sessions that share how they begin, under each placement policy
	@$(PY) -m tests.soak.conversations --seed $(SEED)

predictions: setup-test ## a trace on a serving system, and what the simulator said of it
	@$(PY) -m tests.soak.predictions --seed $(SEED)

vllm-routing: setup ## two servers of vLLM behind a front, by what they hold and in turn
	@scripts/engine.sh vllm --run tests.soak.engines --seed $(SEED)

test-mount: setup-test ## 100,000 random operations and fio's verification on a mount
	@$(PY) -m tests.fs.exercise --seed $(SEED)

test-interop: setup-test ## pandas, zarr, torch and others on the store, in their own environment
	@scripts/interop.sh

test-serving: setup-test ## 200 prompts served in every way, token for token; clients that leave
	@MOONCAKE_TEST_PROMPTS=200 $(PY) -m pytest -n 0 tests/serving/workers/test_equality.py \
		tests/serving/system/test_disconnects.py

test-vllm: setup ## tests of the vLLM connector with vLLM itself, in an environment of its own
	@scripts/engine.sh vllm

test-sglang: setup ## the same for SGLang: its base classes, factory, host pools and controller
	@scripts/engine.sh sglang

test-lmcache: setup ## the same for LMCache: both its plug-in points, and its own connector
	@scripts/engine.sh lmcache

clean:           ## remove everything that is not in git
	@rm -rf .venv .venv-deploy build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@rm -rf .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
