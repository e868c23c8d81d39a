# syntax=docker/dockerfile:1
# vLLM with the connector of this project. From the root of a checkout:
#   docker build --file deploy/docker/vllm.Dockerfile --tag vllm-mooncake .
FROM vllm/vllm-openai:v0.32.0
COPY pyproject.toml LICENSE /source/
COPY docs/package.md /source/docs/
COPY alloc /source/alloc
COPY eviction /source/eviction
COPY kernel_cache /source/kernel_cache
COPY transfer_engine /source/transfer_engine
COPY mooncake_store /source/mooncake_store
COPY serving /source/serving
# Kernels for the processor of this build; another one compiles its own, once for each container.
RUN pip install --no-cache-dir /source && rm -r /source && mooncake warmup
