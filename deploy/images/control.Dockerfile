# This image runs the control plane. To build it, run in the repository's root, after `make dist`:
#   docker build -f deploy/images/control.Dockerfile -t meridian-control:0.1.0 .
# A digest pins the base image exactly, a tag does not: --build-arg BASE=python:3.13-slim@sha256:...
ARG BASE=python:3.13-slim
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/meridian
COPY deploy/requirements.lock /tmp/requirements.lock
RUN /opt/meridian/bin/pip install --require-hashes --only-binary :all: -r /tmp/requirements.lock
COPY dist/*.whl /tmp/dist/
RUN /opt/meridian/bin/pip install --no-index --no-deps /tmp/dist/*.whl \
    && /opt/meridian/bin/pip check \
    && /opt/meridian/bin/pip uninstall --yes pip

FROM ${BASE}
COPY --from=build /opt/meridian /opt/meridian
ENV PATH=/opt/meridian/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/var/lib/meridian
RUN install --directory --owner=10001 --group=10001 /var/lib/meridian
USER 10001:10001
WORKDIR /var/lib/meridian
EXPOSE 50051 50052 9464
STOPSIGNAL SIGTERM
ENTRYPOINT ["meridian-control"]
CMD ["--listen=:50051", "--metrics-listen=:9464", "--health-listen=:50052"]
