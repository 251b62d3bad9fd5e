# outsize with the command line:
#   docker build --tag outsize .
#   docker run --rm --volume /mnt/nvme:/data outsize train --disk /data/disk --run /data/run
# BASE may be an image that has torch for your driver, with the Python of its torch first in PATH. GPUs need locked memory:
# docker run --gpus all --ulimit memlock=-1 ...
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG TORCH=torch==2.13.0
RUN python -c "import torch" 2>/dev/null || pip install --no-cache-dir "${TORCH}"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/outsize-*.whl)[train]"
WORKDIR /data
ENTRYPOINT ["outsize"]
CMD ["--help"]
