# make demo   sets up and trains a CNN on Fashion-MNIST as a pipeline of four ranks
# make test   sets up, lints and runs all tests
# make lint   format, clippy and documentation, all without a warning
# make bench  times the kernels, and the pipeline of two ranks against one
# make bench-peers  times matrix products and training steps of seven models beside PyTorch's, if $TORCH_PYTHON names a Python that has it
# make bench-network  trains on two hosts with slow links (network namespaces; needs root and iproute2), as pipelines and data parallel
# make bench-accuracy  trains to 90 % accuracy on two hosts with a slow link, by data parallelism and as pipelines
# make bench-prediction  compares predicted with measured throughput in five cases, one of them on two hosts (root and iproute2)
# make docs   builds the documentation of the library
# make setup  installs what is missing for the above
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

.PHONY: help setup demo test lint bench bench-peers bench-network bench-accuracy bench-prediction docs release

help:
	@sed -n 's/^# make/make/p' Makefile

setup:
	@scripts/setup.sh

demo: release
	@scripts/demo.sh

test: lint
	@scripts/test.sh --features mpi

lint: setup
	@scripts/lint.sh

bench: release
	@scripts/bench.sh

bench-peers: release
	@scripts/bench-products.sh
	@scripts/bench-peers.sh
	@echo 'bench: without Winograd'; WINOGRAD=0 THREADS=1 ROUNDS=1 scripts/bench-peers.sh
	@echo 'bench: AVX2'; ISA=avx2 THREADS=1 ROUNDS=1 scripts/bench-peers.sh

bench-network: release
	@scripts/bench-network.sh

bench-accuracy: release
	@scripts/bench-accuracy.sh

bench-prediction: release
	@scripts/bench-prediction.sh

docs: setup
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --features mpi

release: setup
	cargo build --release --features mpi --bin pipewright
