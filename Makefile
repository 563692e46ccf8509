# kvlab's front door. Every target that needs Python first sets up its environment, and does so once.

PYTHON ?= python3
PROFILE ?= cpu
SET ?=
ENV ?= auto
export SET PROFILE

# Sets up where needed, and puts the path of the interpreter to use into $py.
ready = command -v $(PYTHON) >/dev/null || { echo 'kvlab: there is no $(PYTHON): install Python 3.11,' \
	'or name one with PYTHON=' >&2; exit 2; }; py="$$($(PYTHON) tools/setup_environment.py --lock $(ENV))" &&

.PHONY: help report compare doctor lab test test-a10 torture setup
.DEFAULT_GOAL := help

help:
	@echo 'kvlab measures what the KV cache does to large-model inference, and writes an article about it.'
	@echo ''
	@echo '  make report                  measure what is missing, write the article into results/$(PROFILE)/'
	@echo '  make report PROFILE=smoke    a first look in a few minutes; profiles are the files in params/'
	@echo '  make report SET="context_lengths=[128,256] language=en"'
	@echo '                               the same with other parameters'
	@echo '  make compare A=cpu B=mine    set two runs side by side, with ratios'
	@echo '  make doctor PROFILE=a10      can this machine run it? what it lacks, in seconds, before set-up too'
	@echo '  make lab                     open the notebooks in JupyterLab'
	@echo '  make test                    run all tests, the smoke profile included'
	@echo '  make test-a10                try the A10 stack on a machine without a card (several GB)'
	@echo '  make torture                 kill, fill, tear and hang the smoke profile at random, for at most 20 minutes'
	@echo '  make setup                   only build the environment; the targets above do it by themselves'
	@echo ''
	@echo '  PYTHON=python3.11            build with this interpreter (an activated environment that has kvlab'
	@echo '                               is used as it is)'
	@echo '  PROFILE=auto                 the profile made for the card that is here, else cpu'
	@echo '  ENV=a10                      the A10 stack in .venv-a10; by default the one that the profile needs'

# $$SET is quoted by the shell and not spelled out by make: brackets, quotes and blanks in it arrive as typed.
report:
	@$(ready) KVLAB_PARENT=$$PPID exec "$$py" -m kvlab report --profile "$$PROFILE" $${SET:+--set "$$SET"}

compare:
	@$(ready) "$$py" -m kvlab compare "$(A)" "$(B)"

lab:
	@$(ready) "$$py" -m jupyterlab --allow-root --ip=127.0.0.1 --ServerApp.root_dir=notebooks

test:
	@$(ready) "$$py" -m pytest $(TESTS)

torture:
	@$(ready) "$$py" tools/torture.py $(TORTURE)

setup:
	@$(ready) echo "kvlab: ready, with $$py"

# With the environment where there is one, else with whatever Python there is.
doctor:
	@py=.venv; grep -qs '^device: cuda' "params/$$PROFILE.yaml" && py=.venv-a10; py="$$py/bin/python"; \
	test -x "$$py" || py=$(PYTHON); "$$py" kvlab/doctor.py --profile "$$PROFILE"

test-a10: ENV = a10
test-a10:
	@$(ready) "$$py" tools/test_a10.py
