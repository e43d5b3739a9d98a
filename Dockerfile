# The gateway as an image: packages from the lock file with their hashes, no compiler, no root.
#
#   docker build -t qos-gateway .
#   docker run --rm -p 127.0.0.1:8000:8000 qos-gateway
#
# A configuration: -v "$PWD/config:/config:ro" and `serve --config /config/gateway.yaml` as the command.
# The API listens on all addresses of the container, without a key until a keys_file is set. The operators'
# port stays on its loopback, where it needs no token: to reach it from outside set both
# QOS_SERVER__OPERATIONS_HOST=0.0.0.0 and QOS_SERVER__OPERATIONS_TOKEN.

ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv /opt/qos-gateway
COPY requirements.lock ./
RUN /opt/qos-gateway/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway ./gateway
RUN /opt/qos-gateway/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/qos-gateway /opt/qos-gateway
ENV PATH=/opt/qos-gateway/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    QOS_SERVER__HOST=0.0.0.0
WORKDIR /config
USER 10001:10001
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 CMD ["qos-gateway", "healthcheck"]
ENTRYPOINT ["qos-gateway"]
CMD ["serve"]
