# Copies the agent into a volume that vLLM's container mounts and has in PYTHONPATH. From the repository's root, after
# `make dist`:
#   docker build -f deploy/images/agent-init.Dockerfile -t meridian-agent-init:0.1.0 .
# Both bases may be given with a digest: --build-arg BASE=busybox:1.37@sha256:...
ARG BUILD=python:3.13-slim
ARG BASE=busybox:1.37
FROM ${BUILD} AS build
COPY dist/*.whl /tmp/dist/
# Without dependencies: vLLM's image has them.
RUN python -m pip install --no-cache-dir --no-index --no-deps --no-compile --target /agent /tmp/dist/*.whl

FROM ${BASE}
COPY --from=build /agent /agent
USER 10001:10001
CMD ["cp", "-R", "/agent/.", "/meridian/"]
