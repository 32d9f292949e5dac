# This image runs the control plane. To build it, run in the repository's root, after `make dist`:
#   docker build -f deploy/images/control.Dockerfile -t meridian-control:0.3.0 .
# A digest pins the base image exactly, a tag does not: --build-arg BASE=python:3.13-slim@sha256:...
ARG BASE=python:3.13-slim
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# elfutils has `eu-strip`, which unlike binutils' `strip` does not break NumPy's libraries. This stage is not part of the
# image, so elfutils may have any version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends elfutils \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/meridian
COPY deploy/requirements.lock /tmp/requirements.lock
RUN /opt/meridian/bin/pip install --require-hashes --only-binary :all: -r /tmp/requirements.lock
COPY dist/*.whl /tmp/dist/
RUN /opt/meridian/bin/pip install --no-index --no-deps /tmp/dist/*.whl \
    && /opt/meridian/bin/pip check \
    && /opt/meridian/bin/pip uninstall --yes pip setuptools
# Files are removed that only developers and tests of the packages need: tests, files for compilers and type checkers,
# NumPy's tools for building, Pydantic's old version, debugging symbols. The control plane highlights no source text and
# uses two databases, so Pygments' lexers and SQLAlchemy's other databases are removed, too. The programs' help shows that
# all three start.
RUN set -e; find /opt/meridian -depth -type d \( -name tests -o -name f2py -o -path '*/numpy/distutils' -o -name __pycache__ \
        -o -path '*/pydantic/v1' -o -path '*/sqlalchemy/testing' \
        -o -path '*/sqlalchemy/dialects/m?sql' -o -path '*/sqlalchemy/dialects/oracle' \) -exec rm -r {} + \
    && find /opt/meridian -type f \( -name '*.pyi' -o -name '*.py[xc]' -o -name '*.pxd' -o -name '*.[acfh]' \
        -o -name '_*_tests.*.so' -o -name '_simd.*.so' \) -delete \
    && find /opt/meridian -path '*/pygments/lexers/*' ! -name __init__.py ! -name _mapping.py -delete \
    && find /opt/meridian -type f -name '*.so*' -exec eu-strip {} + \
    && for program in meridian-control meridian-relay meridianctl; do \
        PYTHONDONTWRITEBYTECODE=1 "/opt/meridian/bin/${program}" --help > /tmp/help; \
    done

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
