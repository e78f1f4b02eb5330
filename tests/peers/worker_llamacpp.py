"""llama.cpp behind the worker protocol, through its C interface: no sampler, no detokeniser."""

from __future__ import annotations

import time

import llama_cpp
import numpy as np
from worker import serve


class LlamaCppEngine:
    """A GGUF file on llama.cpp's CPU backend."""

    version = f"llama-cpp-python {llama_cpp.__version__}"

    def __init__(self, path: str, threads: int, context: int, flash: bool = True) -> None:
        # The wrapper loads, configures and owns the context; nothing else of it runs.
        self._llama = llama_cpp.Llama(
            path,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=max(512, context),
            n_ubatch=512,
            flash_attn=flash,
            verbose=False,
        )
        self._context = self._llama.ctx
        self._vocab = self._llama.n_vocab()

    def _eval(self, ids: list[int]) -> int:
        """Run ``ids`` after what the cache holds; returns the greedy next token."""
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        # llama_batch_get_one asks for the logits of the last token only.
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), shape=(self._vocab,))
        return int(logits.argmax())

    def _start(self, prompt_ids: list[int]) -> tuple[int, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        start = time.perf_counter()
        token = self._eval(prompt_ids)
        return token, time.perf_counter() - start

    def decode(self, prompt_ids: list[int], n: int) -> tuple[float, list[int]]:
        ids = [self._start(prompt_ids)[0]]
        start = time.perf_counter()
        for _ in range(n):
            ids.append(self._eval(ids[-1:]))
        return (time.perf_counter() - start) / n, ids

    def prefill(self, prompt_ids: list[int]) -> tuple[float, int]:
        token, seconds = self._start(prompt_ids)
        return seconds, token


if __name__ == "__main__":
    serve(LlamaCppEngine)
