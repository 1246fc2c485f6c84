# Every target creates what it needs, the virtual environment included, and says what it does.
PYTHON  ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV    ?= .venv
TORCH   ?= torch==2.13.0
PAPER   ?= all
PROFILE ?= smoke
SEEDS   ?=
JOBS    ?=
RUNS    ?= runs
BIN     := $(VENV)/bin
EXTRAS  := run,ecf8,video,optimal_loss,rl,docs,dev

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup test reproduce site bench lab export fuzz

help: ## show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo
	@echo "variables of reproduce: PAPER=$(PAPER) PROFILE=smoke|full|gpu SEEDS=3|0,5,7 JOBS=1"

$(BIN)/.ready: settings.ini setup.py pyproject.toml
	@echo "== creating the virtual environment $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit("iclr26 needs Python 3.11 to 3.13, found " + sys.version.split()[0]) if not (3, 11) <= sys.version_info[:2] <= (3, 13) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH) --editable ".[$(EXTRAS)]"
	@touch $@

setup: $(BIN)/.ready ## create the virtual environment with everything below

test: setup ## run all tests; browser tests need Chromium
	@echo "== testing"
	$(BIN)/python -m pytest -n logical --dist loadgroup

reproduce: setup ## run papers, judge their claims, render the site (see variables)
	@echo "== reproducing $(PAPER), $(PROFILE) profile"
	$(BIN)/python -m iclr26 reproduce $(PAPER) --profile $(PROFILE) --out $(RUNS) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(JOBS),--jobs $(JOBS))
	@$(MAKE) --no-print-directory site
	@$(BIN)/python -m iclr26 report

site: setup ## execute the notebooks (or take finished runs) and render the site
	@echo "== rendering the site"
	$(BIN)/python -m iclr26 site --runs $(RUNS)

bench: setup ## measure the benchmarks and keep their figures
	@echo "== measuring benchmarks, one paper after the other"
	$(BIN)/python -m iclr26 bench $(filter-out all,$(PAPER))

lab: setup ## open the notebooks in JupyterLab
	@echo "== opening JupyterLab on nbs/"
	$(BIN)/jupyter lab nbs

export: setup ## clean the notebooks, export the package and the README from them
	@echo "== exporting notebooks to iclr26/ and README.md"
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	$(BIN)/python -c "from iclr26.lab.site import readme; readme()"

fuzz: setup ## a million mutated ECF8 containers
	@echo "== fuzzing the ECF8 container"
	ICLR26_FUZZ=1000000 $(BIN)/python -m pytest -q tests/ecf8/test_ecf8_fuzz.py --timeout 7200
