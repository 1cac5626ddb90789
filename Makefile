# make demo   sets up and trains a CNN on Fashion-MNIST as a pipeline of four ranks
# make test   sets up, lints and runs all tests
export PATH := $(HOME)/.cargo/bin:$(PATH)

.PHONY: help setup demo test lint bench docs

help:
	@sed -n 's/^# make/make/p' Makefile

setup:
	@scripts/setup.sh

demo: setup
	cargo build --release --features mpi --bin pipewright
	scripts/demo.sh

test: setup lint
	scripts/test.sh --features mpi

lint: setup
	scripts/lint.sh

# make bench  times the kernels, and the pipeline of two ranks against one
bench: setup
	cargo build --release --features mpi --bin pipewright
	scripts/bench.sh

# make docs   builds the documentation of the library
docs: setup
	cargo doc --no-deps --features mpi
