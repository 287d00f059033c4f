# make mnist   sets up, then trains handwritten digits on eight replicas of this CPU
# make live    sets up, then kills and adds processes while they train, and draws that
# make test    sets up, then runs the tests
# make browser installs Chromium, in which tests look at pages of the site
# make tpu-compile compiles a program of every family for TPUs (docs/tpu.md)
# make torchtpu runs the families on TorchTPU, over a CPU (docs/tpu.md)
# make gpu     runs the families on this machine's GPUs (docs/launching.md)
# make tpu-like runs the families as processes on a simulated TPU host
# make outside sets up, then runs other people's tests and models (docs/outside.md)
# make docs    builds the pages and a reference of the packages into build/site
# make bench   runs every benchmark and writes docs/benchmarks/REPORT.md
# make wheel   installs the wheel with declared dependencies alone, and each extra
#
# ENV=xla (default) is torch 2.9 with torch_xla; ENV=torch is the newest torch without it.

PYTHON ?= python3
ENV ?= xla
VENV ?= .venv-$(ENV)
# What the torch environment tests with; any torch from 2.9 on works. That of pyproject.toml
# needs Python 3.11.
TORCH ?= $(shell sed -n 's/^torch = \["\(.*\)"\]/\1/p' pyproject.toml)
# Builds without CUDA, each with its own torchvision: they come first where there is no GPU.
# Where they cannot be had, pip takes what its own index has.
CPU_BUILDS ?= https://download.pytorch.org/whl/cpu
CPU_xla = 'torch==2.9.*' 'torchvision==0.24.*'
CPU_torch = '$(TORCH)'
CPU_outside = $(TORCH_outside) torchvision==0.28.0
# From pip's own index alone.
LARGE_torchtpu = 'torch==2.14.*'
# As many processes as test/conftest.py says; a file's tests stay together, they share
# what is slow to set up.
# Files begin in the order of test/conftest.py, the longest ones first.
PYTEST_ARGS ?= -n auto --dist loadfile --no-loadscope-reorder
# Hundreds of processes import the packages, which each of them would compile.
export PYTHONDONTWRITEBYTECODE :=

REQUIREMENTS_xla = -e '.[xla-cpu,examples,test]'
REQUIREMENTS_torch = '$(TORCH)' -e '.[test]'
# OpenXLA's plugin for CPUs takes libtpu's place.
REQUIREMENTS_torchtpu = $(LARGE_torchtpu) -e '.[torchtpu,test]' xla_cpu_pjrt==0.0.1
REQUIREMENTS_tpu = jax==0.7.1 jaxlib==0.7.1 libtpu==0.0.21
# That of the record of docs/outside.md, and of its torchvision.
TORCH_outside = torch==2.13.0
REQUIREMENTS_outside = $(TORCH_outside) -e '.[test,outside]'
# The packages are not installed: Sphinx reads their source.
REQUIREMENTS_docs = --group docs
# Packages whose dependencies are old or large, and not needed for what we run of them.
ALONE_outside = adaptdl==0.2.11 fairscale==0.4.13 skypilot==0.14.1

PIP = $(VENV)/bin/python -m pip install --quiet --no-compile
# uv where there is one, else pip.
INSTALL = $(VENV)/bin/python tools/install.py
# Those that CI needs.
ENVIRONMENTS = xla torch docs torchtpu outside tpu

define CPU_ONLY
command -v nvidia-smi >/dev/null || \
	$(PIP) --no-deps --retries 0 --index-url $(CPU_BUILDS) $(CPU_$(ENV)) 2>/dev/null || \
	echo "make: no $(CPU_$(ENV)) at $(CPU_BUILDS): pip's own index may bring CUDA"
endef

.PHONY: environments mnist live test test-all browser tmux tpu-compiler tpu-compile torchtpu gpu tpu-like outside newest-trainers wheel docs lint format bench clean help

help:
	@sed -n 's/^# //p' Makefile

$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) uv || true
	$(if $(CPU_$(ENV)),$(CPU_ONLY))
	$(if $(CPU_$(ENV))$(LARGE_$(ENV)),$(INSTALL) $(CPU_$(ENV)) $(LARGE_$(ENV)))
	touch $@

$(VENV)/ready: setup.py pyproject.toml | $(VENV)/torch
	$(INSTALL) $(REQUIREMENTS_$(ENV))
	$(if $(ALONE_$(ENV)),$(INSTALL) --no-deps $(ALONE_$(ENV)))
	touch $@

# What is large two at a time; this project one after the other, since its build writes here.
environments:
	$(MAKE) -j 2 $(ENVIRONMENTS:%=torch-of-%)
	$(MAKE) $(ENVIRONMENTS:%=all-of-%)

torch-of-%:
	$(MAKE) ENV=$* VENV=.venv-$* .venv-$*/torch

all-of-%:
	$(MAKE) ENV=$* VENV=.venv-$* .venv-$*/ready

mnist: $(VENV)/ready
	$(VENV)/bin/python test/variable_train_mnist.py --target-accuracy 97

live: $(VENV)/ready
	$(VENV)/bin/python examples/live/kill_and_join.py

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

# The slow tests too.
test-all: PYTEST_ARGS += -m ''
test-all: test

# Debian's; elsewhere any Chromium or Chrome on the path will do.
browser:
	command -v chromium || command -v google-chrome || { \
		apt-get update -qq && apt-get install -qq --no-install-recommends chromium; }

# By which a job is started and ended on a TPU's hosts, and on simulated ones.
tmux:
	command -v tmux && command -v pkill || { \
		apt-get update -qq && apt-get install -qq --no-install-recommends tmux procps; }

# An environment of its own, for a JAX and the libtpu of torch_xla 2.9.
tpu-compiler:
	$(MAKE) ENV=tpu VENV=.venv-tpu .venv-tpu/ready

# Neither environment has what is the other's.
tpu-compile: $(VENV)/ready tpu-compiler
	$(VENV)/bin/python tools/tpu/compile_programs.py --quick --slices v5e:2x4
	! $(VENV)/bin/python -m pip show --quiet jax libtpu 2>/dev/null
	! .venv-tpu/bin/python -m pip show --quiet torch torch_xla 2>/dev/null

torchtpu:
	$(MAKE) ENV=torchtpu PYTEST_ARGS='-n auto --dist loadfile -m "torchtpu and not slow"' test

# On few processes, which share the GPU's memory.
gpu:
	GPU=1 $(MAKE) ENV=torch PYTEST_ARGS='-n 4 --dist loadfile -m "gpu and not slow"' test

# Few workers, each of whose tests share replicas that have started.
tpu-like: tmux
	$(MAKE) PYTEST_ARGS='-n 2 --dist loadfile --no-loadscope-reorder -m tpu_like --session-timeout 3600' test

outside:
	OUTSIDE=1 $(MAKE) ENV=outside PYTEST_ARGS='-n auto --dist worksteal -m outside test/outside' test

# The adapters to trainers with releases that nothing here has pinned yet.
newest-trainers:
	$(MAKE) ENV=outside VENV=.venv-outside .venv-outside/ready
	.venv-outside/bin/python tools/install.py --upgrade accelerate lightning transformers
	OUTSIDE=1 .venv-outside/bin/python -m pytest -m outside test/outside/integrations

# What it installs is small with this torch, of which there is a build for CPUs.
wheel:
	WHEEL_TORCH='$(TORCH_outside)' $(MAKE) ENV=torch PYTEST_ARGS='-m wheel test/test_wheel.py' test

# Everything anew: a page that stays says nothing of its warnings.
docs:
	$(MAKE) ENV=docs .venv-docs/ready
	.venv-docs/bin/sphinx-build -E -W --keep-going -q -c tools/site -d build/doctrees . build/site

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# On a machine that does nothing else. FULL=1 takes more rounds, and hours.
bench: $(VENV)/ready
	$(MAKE) ENV=torch .venv-torch/ready
	$(MAKE) ENV=outside .venv-outside/ready
	$(VENV)/bin/python tools/report/run_all.py $(if $(FULL),--full)

clean:
	rm -rf .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
