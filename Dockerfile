# The daemon with CPU workers: no torch, no compiler, no shell needed. Its core is compiled.
#
#   docker build -t kvcached .
#   docker run --read-only --cap-drop ALL --security-opt no-new-privileges \
#       -v kvcached-run:/run/kvcached -v ./configs/cpu-tp1.toml:/etc/kvcached/kvcached.toml:ro kvcached
#
# Engines share the volume /run/kvcached. They run as the same user id (10001), or as a user that an [[access.engine]] of the
# configuration names: users = ["root"] for vLLM's image (docs/configuration.md).
# The pools are shared memory of this container (memfd), so its memory limit must hold them; /dev/shm is not used.
# The first process keeps the host pool while the daemon is dead, and starts it again: `docker kill --signal HUP` upgrades or
# restarts the daemon with its cache, and a crash loses nothing of the host pool. The end of the container does, but for what
# [storage] has in the volume /var/cache/kvcached (-v kvcached-disk:/var/cache/kvcached), unless another container keeps the
# memory (`kvcached keep`): configs/compose.yaml and configs/kubernetes.yaml have one, docs/deployment.md explains it.

FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
ENV KVCACHED_COMPILE=1
# The versions that the tests run with: two builds of one commit have the same packages.
RUN python -m venv /opt/kvcached \
    && /opt/kvcached/bin/pip install --no-cache-dir --disable-pip-version-check \
        --constraint /source/tests/environment.lock.txt /source/kvcached_client '/source[curve,encryption,metrics,redis,s3]'

# The same with what device pools on CUDA need. The driver comes from the node, with NVIDIA's container toolkit:
#
#   docker build --target cuda -t kvcached:cuda .
#   docker run --gpus all --ulimit memlock=-1 … kvcached:cuda
#
# Not run on a GPU node yet. `docker run --gpus all kvcached:cuda doctor --cuda` says what driver and devices can do.
FROM build AS build-cuda
RUN /opt/kvcached/bin/pip install --no-cache-dir --disable-pip-version-check \
        --constraint /source/tests/environment.lock.txt '/source/kvcached_client[cuda]'

FROM python:3.12-slim AS run
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin kvcached \
    && install --directory --owner kvcached --mode 0750 /run/kvcached \
    && install --directory --owner kvcached --mode 0700 /run/kvcached-keeper \
    && install --directory --owner kvcached --mode 0700 /var/cache/kvcached
ENV PATH=/opt/kvcached/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KVCACHED_CONFIG=/etc/kvcached/kvcached.toml \
    KVCACHED_RUN_DIR=/run/kvcached
USER kvcached
VOLUME /run/kvcached /var/cache/kvcached
HEALTHCHECK --interval=10s --timeout=6s --start-period=35s CMD ["kvcached", "health"]
ENTRYPOINT ["kvcached"]
CMD ["supervise"]

FROM run AS cuda
COPY --from=build-cuda /opt/kvcached /opt/kvcached
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM run
COPY --from=build /opt/kvcached /opt/kvcached
