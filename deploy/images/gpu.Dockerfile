# A worker for NVIDIA GPUs whose driver takes CUDA 13: `make images`.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Ubuntu's archive drops a version when the next one comes, so that a pinned one could not be built again.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.12 python3.12-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /build
RUN python3.12 -m venv /opt/hypic/venv
COPY constraints/cpu.txt deploy/images/gpu-constraints.txt ./
# The pair of torch and triton that the kernels were measured with, in place of the CPU's.
RUN sed -i -E '/^(torch|triton)==/d' cpu.txt && cat cpu.txt gpu-constraints.txt > constraints.txt
COPY pyproject.toml README.md ./
COPY proto proto
COPY services services
RUN /opt/hypic/venv/bin/pip install -c constraints.txt '.[worker,gpu,grammars]'

FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS worker
# A C compiler and Python's headers are no leftovers: Triton builds the launcher of each kernel when it is first used.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev libpython3.12-dev python3.12 \
 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 hypic && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin hypic
ENV PATH=/opt/hypic/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TRITON_CACHE_DIR=/tmp/triton
LABEL org.opencontainers.image.title="hypic-worker-gpu" \
      org.opencontainers.image.description="HYPIC worker for NVIDIA GPUs" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/hypic/venv /opt/hypic/venv
WORKDIR /opt/hypic
USER 10001:10001
ENTRYPOINT ["hypic"]
CMD ["worker"]
