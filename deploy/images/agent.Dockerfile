# vLLM with the agent in it. From the repository's root, after `make dist`:
#   docker build -f deploy/images/agent.Dockerfile -t meridian-vllm:v0.32.0 .
# It runs as vLLM's image does, and is stock vLLM until MERIDIAN_CONTROL is set. --build-arg BASE=... takes another, or a
# digest.
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
COPY dist/*.whl /tmp/meridian/
# Without an index: what vLLM brought must do, and nothing of it is replaced.
RUN python3 -m pip install --no-cache-dir --no-index /tmp/meridian/*.whl \
    && rm -r /tmp/meridian
