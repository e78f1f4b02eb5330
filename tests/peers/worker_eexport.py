"""eexport behind the worker protocol, through its public engine."""

from __future__ import annotations

import time
from importlib import metadata

from worker import serve

from eexport.runtime.engine import Engine


class EexportEngine:
    """A bundle on the CPU."""

    version = f"eexport {metadata.version('eexport')}, onnxruntime {metadata.version('onnxruntime')}"

    def __init__(self, path: str, threads: int, context: int) -> None:
        self._engine = Engine.load(path, device="cpu", threads=threads, context=context)

    def decode(self, prompt_ids: list[int], n: int) -> tuple[float, list[int]]:
        results = self._engine.generate(prompt_ids, max_tokens=n + 1, ignore_eos=True, reuse_cache=False)
        ids = [next(results).token_id]
        start = time.perf_counter()
        ids += [result.token_id for result in results]
        seconds = time.perf_counter() - start
        if len(ids) != n + 1:
            raise RuntimeError(f"{len(ids)} tokens generated, {n + 1} expected")
        return seconds / n, ids

    def prefill(self, prompt_ids: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        results = self._engine.generate(prompt_ids, max_tokens=1, ignore_eos=True, reuse_cache=False)
        token = next(results).token_id
        seconds = time.perf_counter() - start
        next(results, None)  # lets the generator end
        return seconds, token


if __name__ == "__main__":
    serve(EexportEngine)
