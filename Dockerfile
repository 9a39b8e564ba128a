# docker build -t staleflow .                              CPU
# docker build -t staleflow --build-arg DEVICE=gpu .       GPU: adds vLLM; run with --gpus all
# docker run --rm -it --shm-size=2g -v "$PWD/runs:/work/runs" staleflow run staleness.bound=2
#
# The container takes the arguments of `staleflow`. Weights travel through /dev/shm, of which Docker gives a
# container 64 MB: --shm-size must hold about five copies of the model, and Ray's object store.
# PIP_ARGS reaches every pip call, for instance to choose an index with CPU-only builds of torch.

FROM python:3.11-slim

ARG DEVICE=cpu
ARG PIP_ARGS=""

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1

RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git && rm -rf /var/lib/apt/lists/*

WORKDIR /src
# Dependencies change less often than the source: they are a layer of their own.
COPY constraints.txt ./
RUN pip install ${PIP_ARGS} -c constraints.txt setuptools "$(grep '^torch==' constraints.txt)"

COPY pyproject.toml README.md LICENSE ./
COPY staleflow staleflow
COPY cli cli
COPY experiments experiments
COPY configs configs
RUN if [ "$DEVICE" = gpu ]; then extra='[vllm]'; else extra=''; fi \
    && pip install ${PIP_ARGS} --no-build-isolation -c constraints.txt ".${extra}"

WORKDIR /work
ENTRYPOINT ["staleflow"]
CMD ["run"]
