"""The engine: one bundle loaded, one request at a time, one result per token."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np

from eexport.runtime.backend import Array, Backend
from eexport.runtime.chain import Chain
from eexport.runtime.device import available_memory, open_backend
from eexport.runtime.errors import ContextError, DeviceError, EexportError, RequestError
from eexport.runtime.manifest import Manifest, check_files, read_manifest
from eexport.runtime.sampler import Sampler, SamplingParams
from eexport.runtime.stops import StopMatcher
from eexport.runtime.text import TextCodec

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
FinishReason = Literal["stop", "length"]

# Rows of a prefill step: enough to amortise reading the weights, few enough that scores stay in the cache.
PREFILL_ROWS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One generated token. ``text`` is what it adds to the output, which may be nothing yet.

    Attributes:
        token_id: Its id.
        text: The delta.
        logprob: Natural log of the model's own probability of it; None unless ``logprobs`` was asked for.
        top_logprobs: The likeliest tokens at this place with their logprobs.
        finish_reason: On the last token: "stop" (an end token or stop string) or "length".
        exit_layer: Depth at which it was decided.
        proposer: Who drafted it; None when nobody did.
    """

    token_id: int
    text: str
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None
    exit_layer: int
    proposer: str | None


@dataclasses.dataclass
class Stats:
    """Counts of the last request; seconds are wall time."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    layers_executed: int = 0
    engines_launched: int = 0


class Engine:
    """A loaded bundle. Requests share the cache: what a prompt has in common with the last one is not run again."""

    def __init__(self, manifest: Manifest, chain: Chain, codec: TextCodec, context: int) -> None:
        """Use ``Engine.load``; this is for tests with a scripted backend."""
        self.manifest = manifest
        self.codec = codec
        self.context = context
        self._chain = chain
        self._depth, self._blocks = manifest.model.num_layers, len(manifest.blocks)
        self._cached: list[int] = []  # the tokens whose keys and values the chain holds
        self._request = 0
        self._stats = Stats()

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        device: str = "auto",
        threads: int | None = None,
        context: int | None = None,
        *,
        backend: Backend | None = None,
        check_hashes: bool = True,
    ) -> "Engine":
        """Load a bundle.

        Args:
            bundle: Its folder.
            device: "auto", or one by name, which is then used or refused.
            threads: CPU threads; None is all that this process may use.
            context: Cap on prompt and output together, in tokens; None is the model's, or what memory allows.
            backend: Instead of ``device`` and ``threads``.
            check_hashes: Compare every file with the manifest first.

        Raises:
            BundleError: Not a bundle, or altered.
            DeviceError: The device cannot be used here, or memory is short.
        """
        folder = Path(bundle)
        manifest = read_manifest(folder)
        if check_hashes:
            check_files(folder, manifest)
        limit = _context_limit(manifest, context)
        codec = load_codec(folder, manifest)
        chain = Chain(folder, manifest, backend or open_backend(device, threads), limit)
        return cls(manifest, chain, codec, limit)

    @property
    def backend(self) -> Backend:
        """What executes the stages."""
        return self._chain.backend

    def generate(
        self, prompt: Prompt, *, mode: Literal["full"] = "full", reuse_cache: bool = True, **sampling: Any
    ) -> Iterator[Token]:
        """Generate from a prompt; see ``SamplingParams`` for the keywords (max_tokens, temperature, stop, seed, …).

        Args:
            prompt: Raw text, token ids, or messages for the chat template.
            mode: "full" runs every layer for every token.
            reuse_cache: Keep what the last request left in the cache where the prompts agree.
            **sampling: Fields of ``SamplingParams``.

        Returns:
            An iterator of one ``Token`` each. A later request ends it: it then raises EexportError.

        Raises:
            RequestError: At once, before anything runs, naming the field that is wrong.
        """
        if mode != "full":
            raise RequestError(f"mode: expected full, got {mode!r} (this bundle has no exits)", "mode")
        try:
            params = SamplingParams(**sampling)
        except TypeError as error:
            raise RequestError(f"unknown sampling parameter: {error}") from None
        ids = self._encode(prompt)
        if len(ids) >= self.context:
            raise ContextError(
                f"the prompt has {len(ids)} tokens and the context {self.context}, which leaves none to generate: "
                "shorten it or raise --context",
                "prompt",
            )
        self._request += 1
        return self._run(self._request, ids, params, reuse_cache)

    def stats(self) -> Stats:
        """Counts of the last request so far."""
        return dataclasses.replace(self._stats)

    def clear(self) -> None:
        """Empty the cache, give its memory back and end a running request."""
        self._request += 1
        self._reset()

    def time_stages(self, ids: Sequence[int]) -> list[float]:
        """Seconds that each stage takes for ``ids`` after what the cache holds, with logits for every row.

        The cache stays as it is, so a request can go on after it was measured between two of its tokens.

        Raises:
            ContextError: When the rows do not fit; this ends a running request.
        """
        with self._whole_or_reset(len(ids)):
            return self._chain.time_stages(ids)

    def score(self, ids: Sequence[int]) -> Array:
        """Logits [T, V] at every position of a text, in a copy. Empties the cache and ends a running request."""
        self.clear()
        rows = [np.array(self._chain.forward(part, len(part))) for part in chunks(ids, PREFILL_ROWS)]
        self._reset()
        return np.concatenate(rows)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.codec.encode(prompt)
            if not ids and self.manifest.model.bos_token_id is not None:
                ids = [self.manifest.model.bos_token_id]
        elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            ids = self.codec.encode_chat(prompt)  # type: ignore[arg-type]
        elif _is_token_ids(prompt):
            ids = [int(i) for i in prompt]
        else:
            raise RequestError("prompt: give text, a list of token ids or a list of messages", "prompt")
        if not ids:
            raise RequestError("prompt: it is empty, and this model has no token to begin a text with", "prompt")
        vocab = self.manifest.model.vocab_size
        if not all(0 <= i < vocab for i in ids):
            raise RequestError(f"prompt: token ids must lie between 0 and {vocab - 1}", "prompt")
        return ids

    def _run(self, request: int, ids: list[int], params: SamplingParams, reuse_cache: bool) -> Iterator[Token]:
        self._claim(request)
        stats = self._stats = Stats(prompt_tokens=len(ids))
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self.manifest.model.eos_token_ids)
        limit = self.context - len(ids)
        limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
        sampler, stream, stops = Sampler(params, ids), self.codec.stream(), StopMatcher(params.stop)
        started = time.perf_counter()
        logits = self._prefill(ids, reuse_cache)
        while True:
            token_id, logprob, top = sampler.sample(logits[0])
            sampler.observe(token_id)
            stats.generated_tokens += 1
            reason: FinishReason | None = None
            text = ""
            if token_id in ends:
                reason = "stop"
            else:
                text, matched = stops.push(stream.push(token_id))
                if matched:
                    reason = "stop"
                elif stats.generated_tokens == limit:
                    reason = "length"
            if reason and not stops.matched:
                text += stops.push(stream.flush())[0] + stops.flush()
                reason = "stop" if stops.matched else reason
            # Sampling and text are part of a token's cost; what the caller does with it is not.
            seconds = time.perf_counter() - started
            if stats.generated_tokens == 1:
                stats.prefill_seconds = seconds
            else:
                stats.decode_seconds += seconds
            yield Token(token_id, text, logprob, top, reason, self._depth, None)
            if reason:
                return
            started = time.perf_counter()
            logits = self._forward(request, [token_id])

    def _prefill(self, ids: list[int], reuse_cache: bool) -> Array:
        """Run the part of the prompt that the cache does not hold; logits [1, V] of its last token."""
        shared = common_prefix(self._cached, ids[:-1]) if reuse_cache else 0
        self._stats.reused_tokens = shared
        if shared:
            self._chain.kv.trim(self._chain.kv.length - shared)
            del self._cached[shared:]
        else:
            self._reset()
        new = ids[shared:]
        with self._whole_or_reset(len(new)):
            self._chain.reserve(len(new))
        *parts, last = chunks(new, PREFILL_ROWS)
        for part in parts:
            self._forward(self._request, part, head_rows=0)
        return self._forward(self._request, last)

    def _forward(self, request: int, ids: list[int], head_rows: int = 1) -> Array:
        self._claim(request)
        with self._whole_or_reset(len(ids)):
            logits = self._chain.forward(ids, head_rows)
        self._cached += ids
        self._stats.layers_executed += self._depth * len(ids)
        self._stats.engines_launched += 1 + self._blocks + (head_rows > 0)
        return logits

    @contextmanager
    def _whole_or_reset(self, rows: int) -> Iterator[None]:
        """Start over when a step breaks off: some blocks would have its rows and some not."""
        try:
            yield
        except MemoryError:
            length = len(self._cached) + rows
            self.clear()
            raise DeviceError(f"out of memory at {length} tokens: use a smaller --context") from None
        except BaseException:  # also Ctrl-C
            self.clear()
            raise

    def _claim(self, request: int) -> None:
        if request != self._request:
            raise EexportError("this request was ended by a later one on the same engine: load an engine for each")

    def _reset(self) -> None:
        self._cached.clear()
        self._chain.reset()


def load_codec(bundle: Path, manifest: Manifest) -> TextCodec:
    """The bundle's tokenizer and chat template."""
    template = manifest.text.chat_template
    text = None if template is None else (bundle / template).read_text(encoding="utf-8")
    return TextCodec.load(bundle, chat_template=text, special=manifest.text.special)


def _context_limit(manifest: Manifest, context: int | None) -> int:
    """The cap on the context, in tokens; the default leaves half of the free memory for the rest."""
    longest, per_token = manifest.model.context_length, manifest.kv_bytes_per_token()
    free = available_memory()
    if context is None:
        return longest if free is None else max(1, min(longest, free // 2 // per_token))
    if not 1 <= context <= longest:
        raise ContextError(f"--context {context}: this model takes 1 to {longest} tokens", "context")
    if free is not None and context * per_token > free:
        raise DeviceError(
            f"--context {context} needs {context * per_token / 1e9:.1f} GB for keys and values and {free / 1e9:.1f} GB "
            f"are free: {free // 2 // per_token} tokens would fit"
        )
    return context


def _is_token_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):  # bytes are a sequence of ints too
        return False
    return all(isinstance(i, int | np.integer) for i in prompt)


def chunks(ids: Sequence[int], rows: int) -> Iterator[list[int]]:
    """``ids`` in parts of ``rows``, the last perhaps shorter."""
    for start in range(0, len(ids), rows):
        yield list(ids[start : start + rows])


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
