# Every target sets up what it needs in $(VENV); nothing has to be installed before but Python 3.11+ and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

# Every worker process of every test would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Which real clusters `make test-clusters` and `make test-smoke` set up.
CLUSTERS ?= slurm gridengine ray kubernetes
REAL := slurm or gridengine or ray or kubernetes

# How many processes run the tests.
JOBS ?= 2

.PHONY: demo test test-long test-examples test-jax test-network test-browser test-doctor test-clusters test-smoke check guarantees tour search simulate mutations format bench soak soak-short paper paper-quick clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python examples/ppo_detach.py --demo --plot runs/demo.png

test: $(VENV)/.ready
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow and not network and not examples and not browser and not doctor and not ($(REAL))"

test-long: $(VENV)/.ready
	$(BIN)/pytest -n $(JOBS) -m slow

test-examples: $(VENV)/.ready
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m examples

# Environments of gymnax and brax, with the Gymnasium that they need.
test-jax: $(VENV)-jax/.ready
	$(VENV)-jax/bin/pytest tests/local/test_jax.py

$(VENV)-jax/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-jax
	$(VENV)-jax/bin/pip install --quiet -e ".[jax]" cloudpickle hypothesis psutil pytest pytest-timeout pytest-xdist
	touch $@

# Needs root: the machines of its clusters are network namespaces, and it makes a control group.
test-network: $(VENV)/.ready
	command -v ip bridge tc ss > /dev/null || apt-get install --yes --quiet iproute2
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m network

# Real runs with injected faults: does the doctor name them? Gates nothing: other work on the machine is a fault too.
test-doctor: $(VENV)/.ready
	$(BIN)/pytest -m doctor

# The page of a run in a real browser; screenshots go to runs/page.
test-browser: $(VENV)/.ready
	$(BIN)/pytest -m browser

# Each needs root but Ray: packages are installed, Kubernetes is built once (about 10 minutes) and kept in ~/.cache.
test-clusters: $(VENV)/.ready
	for kind in $(CLUSTERS); do $(BIN)/pytest -m $$kind || exit 1; done

test-smoke: $(VENV)/.ready
	for kind in $(CLUSTERS); do $(BIN)/pytest -m "smoke and $$kind" || exit 1; done

# The tests of docs/guarantees.md, on one machine, in namespaces and on the clusters (40 minutes); then its tables are made anew.
guarantees: $(VENV)/.ready
	rm -rf runs/guarantees
	CLUSTERENV_GUARANTEES=runs/guarantees/here.jsonl $(BIN)/pytest -m "guarantee and not ($(REAL))"
	for kind in $(CLUSTERS); do CLUSTERENV_GUARANTEES=runs/guarantees/$$kind.jsonl $(BIN)/pytest -m "guarantee and $$kind"; done
	$(BIN)/python -m tools.guarantees runs/guarantees/*.jsonl

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Sizes of files and functions, and how many functions a step, a rollout and a loss cross. `TOUR=--check` fails past a limit.
tour: $(VENV)/.ready
	$(BIN)/python -m tools.tour $(TOUR)

# Simulated runs with fresh seeds; gates nothing. SEARCH="--minutes 30 --processes 8".
search: $(VENV)/.ready
	$(BIN)/python -m tools.search $(SEARCH)

# The same with fixed seeds: three minutes or less. As many as are always reached, so that no run finds what others do not.
simulate: $(VENV)/.ready
	$(BIN)/python -m tools.search --minutes 10 --schedules 10000 --seed 0 --processes $(JOBS) --complete

# Which planted defects the simulated runs find, and how soon.
mutations: $(VENV)/.ready
	$(BIN)/python -m tools.mutations $(MUTATIONS)

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks $(BENCH)

# An hour of random faults: no hang, an exact ledger, flat memory. Report, samples and plot go to runs/soak. Without root
# its nodes are processes over loopback. `SOAK="--hostile --minutes 5"`: a node that lies beside three good ones.
soak: $(VENV)/.ready
	$(BIN)/python -m tools.soak $(SOAK)

soak-short: $(VENV)/.ready
	$(BIN)/python -m tools.soak --minutes 3 --seed 1

# What adaptive synchronization is worth. Runs what is missing of the raw lines (hours), then makes docs/evidence.md anew.
paper: $(VENV)/.ready
	$(BIN)/python -m experiments main cheetah grid ablations paper
	$(BIN)/python -m experiments.report

# A reduced set: two plots and the tables, in minutes.
paper-quick: $(VENV)/.ready
	$(BIN)/python -m experiments quick --data runs/paper-quick/runs.jsonl
	$(BIN)/python -m experiments.report --show --data runs/paper-quick/runs.jsonl --plots runs/paper-quick

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
