# A finished run behind HTTP, on the processor. Build from the root of the repository, mount a run, give a key:
#
#   docker build --tag fedecider-serve .
#   docker run --read-only --tmpfs /tmp --publish 127.0.0.1:8000:8000 \
#     --volume "$PWD/runs/first:/run-folder:ro" --env FEDECIDER_API_KEY fedecider-serve
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY configs configs
COPY fedecider fedecider
COPY idgen idgen
COPY distill distill
COPY embedding_fr embedding_fr
# torch first, in its build for processors: the default one brings gigabytes of CUDA.
RUN python -m venv /venv \
 && /venv/bin/python -m pip install --no-cache-dir --constraint constraints.txt \
      --extra-index-url https://download.pytorch.org/whl/cpu torch \
 && /venv/bin/python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && wheel="$(ls /wheels/fedecider-*.whl)" \
 && /venv/bin/python -m pip install --no-cache-dir --constraint constraints.txt "${wheel}[serve]"

FROM python:3.12-slim
RUN useradd --system --uid 10001 --no-create-home fedecider
COPY --from=build /venv /venv
ENV HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/tmp/numba OMP_NUM_THREADS=2
USER 10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 \
  CMD ["/venv/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/venv/bin/fedecider", "serve"]
CMD ["--run", "/run-folder", "--host", "0.0.0.0", "--port", "8000"]
