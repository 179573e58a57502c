.PHONY: format lint type test

format:
	ruff format .
	ruff check --fix .

lint:
	ruff format --check .
	ruff check .

type:
	mypy

test:
	python -m pytest -n 2
