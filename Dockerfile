# docker build -t staleflow .                              CPU
# docker build -t staleflow --build-arg DEVICE=gpu .       GPU: vLLM and DeepSpeed from the extras
# docker run --rm -it --shm-size=2g -v "$PWD/runs:/work/runs" staleflow run staleness.bound=2
# docker run --rm -it --gpus all --shm-size=16g -v "$PWD:/work" staleflow run configs/gpu1.yaml
#
# The container takes the arguments of `staleflow`. Weights travel through /dev/shm, of which Docker gives a
# container 64 MB: --shm-size must hold two copies of the model in float32 and one for each engine, and Ray's
# object store.
# PIP_ARGS reaches every pip call, for instance to choose an index with CPU-only builds of torch.
#
# The GPU image takes torch and vLLM as built for CUDA on PyPI, whose wheels bring the CUDA libraries; the
# host needs a driver and nvidia-container-toolkit. Neither image was built where this was written: there is
# no Docker there. To check the GPU image:
# docker run --rm --gpus all --shm-size=16g --entrypoint /src/scripts/gpu_check.sh staleflow

FROM python:3.11-slim

ARG DEVICE=cpu
ARG PIP_ARGS=""

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1 \
    DS_BUILD_OPS=0

RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev git && rm -rf /var/lib/apt/lists/*

WORKDIR /src
# Dependencies change less often than the source: they are a layer of their own. torch goes first and pinned,
# without the local part of its version: DeepSpeed is built against it, and vLLM wants this very version.
COPY constraints.txt ./
RUN sed -i -E 's/^(torch==[0-9.]+)\+cpu$/\1/' constraints.txt \
    && pip install ${PIP_ARGS} -c constraints.txt setuptools "$(grep '^torch==' constraints.txt)"
# The constraints are those of a machine without a GPU: what vLLM for CUDA asks for beyond them it chooses itself.
RUN if [ "$DEVICE" = gpu ]; then \
        pip install ${PIP_ARGS} "vllm>=0.32,<0.33" \
        && pip install ${PIP_ARGS} --no-build-isolation "deepspeed>=0.19.8"; \
    fi

COPY pyproject.toml README.md LICENSE ./
COPY staleflow staleflow
COPY cli cli
COPY experiments experiments
COPY configs configs
COPY scripts scripts
RUN if [ "$DEVICE" = gpu ]; then \
        pip install ${PIP_ARGS} --no-build-isolation ".[vllm,deepspeed]"; \
    else \
        pip install ${PIP_ARGS} --no-build-isolation -c constraints.txt .; \
    fi

WORKDIR /work
ENTRYPOINT ["staleflow"]
CMD ["run"]
