# Two images for machines without a GPU, `services` (router and cache service) and `worker`: `make images`.
FROM python:3.12.12-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
RUN python -m venv /opt/hypic/venv
COPY constraints/cpu.txt constraints.txt
COPY pyproject.toml README.md ./
COPY proto proto
COPY services services

FROM build AS build-services
RUN /opt/hypic/venv/bin/pip install -c constraints.txt '.[router,cache]'

FROM build AS build-worker
# Without it pip takes torch for CUDA, of some 3 GB, which runs on a CPU as well.
ARG TORCH_INDEX=""
RUN /opt/hypic/venv/bin/pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '.[worker,grammars]'

FROM python:3.12.12-slim-bookworm AS runtime
RUN groupadd --gid 10001 hypic && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin hypic
ENV PATH=/opt/hypic/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
LABEL org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /opt/hypic
USER 10001:10001
ENTRYPOINT ["hypic"]
CMD ["--help"]

FROM runtime AS worker
LABEL org.opencontainers.image.title="hypic-worker-cpu" \
      org.opencontainers.image.description="HYPIC worker for CPUs, with the demo model"
COPY --from=build-worker /opt/hypic/venv /opt/hypic/venv
COPY models/demo /opt/hypic/models/demo

# Router and cache service: neither needs torch.
FROM runtime AS services
LABEL org.opencontainers.image.title="hypic-services" \
      org.opencontainers.image.description="HYPIC router and cache service"
COPY --from=build-services /opt/hypic/venv /opt/hypic/venv
