#!/bin/sh
# Serves a model with two data-parallel ranks:
#
#     MERIDIAN_CONTROL=host:50051 MERIDIAN_ENGINE_ID=pod-7 sh data_parallel.sh Qwen/Qwen3-8B --reasoning-parser qwen3
#
# Each rank is an engine of its own for the control plane: `meridianctl engines` lists `pod-7` and `pod-7-dp1`. vLLM
# divides the requests between the ranks, and each rank is governed by itself. Without MERIDIAN_ENGINE_ID the host's
# name takes the place of `pod-7`.
exec vllm serve "$@" --data-parallel-size 2
