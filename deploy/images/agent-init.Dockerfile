# This image copies the agent into a volume that vLLM's container mounts and has in PYTHONPATH. To build it, run in the
# repository's root, after `make dist`:
#   docker build -f deploy/images/agent-init.Dockerfile -t meridian-agent-init:0.3.0 .
# Both base images may be given with a digest: --build-arg BASE=busybox:1.37@sha256:...
# PYTHON is the Python version in vLLM's image, which CuPy's wheel must fit. CUPY is the CuPy package for the CUDA
# version in vLLM's image: cupy-cuda12x for CUDA 12, or empty for an image without a GPU.
ARG BUILD=python:3.13-slim
ARG BASE=busybox:1.37
FROM ${BUILD} AS build
ARG PYTHON=3.12
ARG CUPY=cupy-cuda13x
ARG CUPY_VERSION=14.2.0
RUN mkdir /agent \
    && if [ -n "${CUPY}" ]; then \
        python -m pip install --no-cache-dir --no-deps --no-compile --only-binary :all: --python-version "${PYTHON}" \
            --target /agent "${CUPY}==${CUPY_VERSION}"; \
    fi
COPY dist/meridian_llm-*.whl /tmp/dist/
# The agent is installed without its dependencies, because vLLM's image has them.
RUN python -m pip install --no-cache-dir --no-index --no-deps --no-compile --target /agent /tmp/dist/*.whl

FROM ${BASE}
COPY --from=build /agent /agent
USER 10001:10001
CMD ["cp", "-R", "/agent/.", "/meridian/"]
