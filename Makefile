# Two commands matter: `make run` (set up, fetch the default model, answer) and `make test` (set up, pass the tests).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= Why is the sky blue?
