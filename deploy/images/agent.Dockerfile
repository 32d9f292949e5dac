# This image is vLLM's image with the agent added. To build it, run in the repository's root, after `make dist`:
#   docker build -f deploy/images/agent.Dockerfile -t meridian-vllm:v0.32.0 .
# The image runs like vLLM's image, and runs stock vLLM until MERIDIAN_CONTROL is set. --build-arg BASE=... selects
# another base image, or a digest. CUPY is the CuPy package for the CUDA version in the base image: cupy-cuda12x for
# CUDA 12, or empty for an image without a GPU.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
ARG CUPY=cupy-cuda13x
ARG CUPY_VERSION=14.2.0
# CuPy is installed without its dependencies, so that no package of vLLM's image is replaced.
RUN if [ -n "${CUPY}" ]; then \
        python3 -m pip install --no-cache-dir --no-deps --only-binary :all: "${CUPY}==${CUPY_VERSION}"; \
    fi
COPY dist/meridian_llm-*.whl /tmp/meridian/
RUN python3 -m pip install --no-cache-dir --no-index /tmp/meridian/*.whl \
    && rm -r /tmp/meridian
