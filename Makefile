# kvlab's front door. Every target that needs Python sets up its environment first, and does so once.

PYTHON ?= python3
PROFILE ?= cpu
SET ?=
ENV ?= cpu
export SET

# Prints the interpreter to use on stdout (progress goes to stderr), after setting it up where needed.
python = py="$$($(PYTHON) tools/setup_environment.py --lock $(ENV))" &&

.PHONY: help report test lab setup
.DEFAULT_GOAL := help

help:
	@echo 'kvlab: what the KV cache does to large-model inference, measured on this machine'
	@echo ''
	@echo '  make report                    measure what is missing, write the article (results/cpu/article.en.html)'
	@echo '  make report PROFILE=smoke      the same in under four minutes, for a first look'
	@echo '  make report SET="context_lengths=[128,256] language=zh"'
	@echo '                                 with other parameters than those of params/<profile>.yaml'
	@echo '  make lab                       open the notebooks in JupyterLab'
	@echo '  make test                      run every test, the smoke profile included'
	@echo '  make setup                     only build the environment (.venv); the others do it by themselves'
	@echo ''
	@echo '  PYTHON=python3.11              another interpreter; an activated environment with kvlab is used as it is'

setup:
	@$(python) echo "ready: $$py"

report:
	@$(python) "$$py" -m kvlab report --profile "$(PROFILE)" $${SET:+--set "$$SET"}

lab:
	@$(python) "$$py" -m jupyterlab --ip=127.0.0.1 notebooks

test:
	@$(python) "$$py" -m pytest
