# The gateway as an image: packages from a lock file with their hashes, no compiler, no pip, no root. What a
# shared state (`state: redis://…`) and traces (`tracing.endpoint`) need is in it.
#
#   docker build -t qos-gateway:0.1.0 .
#   docker run --rm -p 127.0.0.1:8000:8000 --read-only --cap-drop ALL qos-gateway:0.1.0
#
# A configuration: -v "$PWD/config:/config:ro" and `serve --config /config/gateway.yaml` as the command. Leave
# the ports at 8000 and 8001 there and map them here: the health check asks 8000. Nothing is written to disk,
# so the root may be read-only; a `decision_log` needs a volume that user 10001 may write.
#
# The API listens on all addresses of the container, without a key until a keys_file is set. The operators'
# port stays on its loopback, where it needs no token: to reach it from outside set both
# QOS_SERVER__OPERATIONS_HOST=0.0.0.0 and QOS_SERVER__OPERATIONS_TOKEN.
#
# A package index of your own, of which nothing stays in the image: --secret id=pip_conf,src=$HOME/.pip/pip.conf
# Another base, which needs python3 (3.11 or newer) with venv: --build-arg PYTHON_IMAGE=…

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# pip stands in an environment of its own and fills the one that becomes the image.
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/qos-gateway
ENV PIP_PYTHON=/opt/qos-gateway/bin/python \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements-image.lock ./
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements-image.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway ./gateway
RUN /opt/build/bin/pip install --no-index --no-deps --no-build-isolation . \
 && /opt/build/bin/pip uninstall --yes setuptools

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="qos-gateway" \
      org.opencontainers.image.description="A QoS gateway in front of vLLM: priority classes, token budgets and latency promises." \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/qos-gateway /opt/qos-gateway
ENV PATH=/opt/qos-gateway/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    QOS_SERVER__HOST=0.0.0.0
WORKDIR /config
USER 10001:10001
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=10s --start-period=20s --retries=3 CMD ["qos-gateway", "healthcheck"]
ENTRYPOINT ["qos-gateway"]
CMD ["serve"]
