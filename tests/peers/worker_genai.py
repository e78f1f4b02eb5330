"""onnxruntime-genai behind the worker protocol."""

from __future__ import annotations

import json
import time
from importlib import metadata

import numpy as np
import onnxruntime_genai as og
from worker import serve


class GenaiEngine:
    """A model folder of onnxruntime-genai's builder on the CPU provider."""

    version = f"onnxruntime-genai {og.__version__}, onnxruntime {metadata.version('onnxruntime')}"

    def __init__(self, path: str, threads: int, context: int) -> None:
        config = og.Config(path)
        session = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = og.Model(config)
        self._params = og.GeneratorParams(self._model)
        # min_length keeps EOS out of the argmax: one masked logit a step. A prompt in chunks of 128 is prefilled
        # about 4% faster than whole; other sizes, thread spinning, arenas and denormals change nothing or less.
        self._params.set_search_options(max_length=context, min_length=context, chunk_size=128, do_sample=False)

    def _start(self, prompt_ids: list[int]) -> tuple[og.Generator, float]:
        """Prefill a fresh generator and pick its first token; returns it and the seconds taken."""
        generator = og.Generator(self._model, self._params)
        ids = np.array([prompt_ids], dtype=np.int32)
        start = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()
        return generator, time.perf_counter() - start

    def decode(self, prompt_ids: list[int], n: int) -> tuple[float, list[int]]:
        generator, _ = self._start(prompt_ids)
        start = time.perf_counter()
        for _ in range(n):
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        ids = [int(i) for i in generator.get_sequence(0)[len(prompt_ids) :]]
        if len(ids) != n + 1:
            raise RuntimeError(f"{len(ids)} tokens generated, {n + 1} expected")
        return seconds / n, ids

    def prefill(self, prompt_ids: list[int]) -> tuple[float, int]:
        generator, seconds = self._start(prompt_ids)
        return seconds, int(generator.get_sequence(0)[-1])


if __name__ == "__main__":
    serve(GenaiEngine)
