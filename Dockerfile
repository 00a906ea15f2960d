# docker build -t qtrain . && docker run --gpus all --ipc host -v "$PWD:/work" qtrain qtrain-llm-pretrain --list
#
# The tested versions on CUDA. The host brings the driver; torch's packages bring CUDA's libraries.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base
# Triton and Inductor compile their launchers with the C++ compiler and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/qtrain
ENV PATH=/opt/qtrain/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

FROM base AS wheel
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM base
COPY requirements.txt /tmp/
RUN pip install -r /tmp/requirements.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
WORKDIR /work
CMD ["qtrain-llm-pretrain", "--help"]
