# kvlab's front door. Every target that needs Python first sets up its environment, and does so once.

PYTHON ?= python3
PROFILE ?= cpu
SET ?=
ENV ?= cpu
export SET PROFILE

# Sets up where needed, and puts the path of the interpreter to use into $py.
ready = command -v $(PYTHON) >/dev/null || { echo 'kvlab: there is no $(PYTHON): install Python 3.11,' \
	'or name one with PYTHON=' >&2; exit 2; }; py="$$($(PYTHON) tools/setup_environment.py --lock $(ENV))" &&

.PHONY: help report compare lab test torture setup
.DEFAULT_GOAL := help

help:
	@echo 'kvlab measures what the KV cache does to large-model inference, and writes an article about it.'
	@echo ''
	@echo '  make report                  measure what is missing, write the article into results/$(PROFILE)/'
	@echo '  make report PROFILE=smoke    a first look in a few minutes; profiles are the files in params/'
	@echo '  make report SET="context_lengths=[128,256] language=en"'
	@echo '                               the same with other parameters'
	@echo '  make compare A=cpu B=mine    set two runs side by side, with ratios'
	@echo '  make lab                     open the notebooks in JupyterLab'
	@echo '  make test                    run all tests, the smoke profile included'
	@echo '  make torture                 kill, fill, tear and hang the smoke profile at random, for at most 20 minutes'
	@echo '  make setup                   only build the environment; the targets above do it by themselves'
	@echo ''
	@echo '  PYTHON=python3.11            build with this interpreter (an activated environment that has kvlab'
	@echo '                               is used as it is)'
	@echo '  ENV=a10                      the NVIDIA A10 stack of requirements/a10.txt, in .venv-a10'

# $$SET is quoted by the shell and not spelled out by make: brackets, quotes and blanks in it arrive as typed.
report:
	@$(ready) exec "$$py" -m kvlab report --profile "$$PROFILE" $${SET:+--set "$$SET"}

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
