# vLLM with the agent in it. From the repository's root, after `make dist`:
#   docker build -f deploy/images/agent.Dockerfile -t meridian-vllm:v0.32.0 .
# It runs as vLLM's image does, and is stock vLLM until MERIDIAN_CONTROL is set. --build-arg BASE=... takes another, or a
# digest. CUPY is for the image's CUDA: cupy-cuda12x where that is 12; empty for an image without a GPU.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
ARG CUPY=cupy-cuda13x
ARG CUPY_VERSION=14.2.0
# Without dependencies: what vLLM brought must do, and nothing of it is replaced.
RUN if [ -n "${CUPY}" ]; then \
        python3 -m pip install --no-cache-dir --no-deps --only-binary :all: "${CUPY}==${CUPY_VERSION}"; \
    fi
COPY dist/*.whl /tmp/meridian/
RUN python3 -m pip install --no-cache-dir --no-index /tmp/meridian/*.whl \
    && rm -r /tmp/meridian
