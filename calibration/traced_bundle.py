"""The depths that a bundle gives out, run by the runtime: what the device itself would see, without torch."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from eexport.calibration.traced import Floats, check_finite, cosine
from eexport.runtime.backend import Backend
from eexport.runtime.chain import Chain
from eexport.runtime.engine import PREFILL_ROWS, chunks, common_prefix
from eexport.runtime.manifest import Manifest


class BundleModel:
    """A ``TracedModel`` over a bundle, one sequence at a time; see ``traced.TracedModel``."""

    width = 1
    slots = 1  # of no account with one sequence

    def __init__(self, folder: Path, manifest: Manifest, backend: Backend, context: int) -> None:
        """Load the bundle's stages; ``context`` caps the cache, in tokens."""
        self._chain = Chain(folder, manifest, backend, context)
        self._cached: list[int] = []
        self.name = manifest.model.name
        self.identity = bundle_identity(manifest)
        self.form = f"bundle, {manifest.precision.weights}"
        self.num_layers = manifest.model.num_layers
        self.depths = self._chain.depths
        self.eos_token_ids = frozenset(manifest.model.eos_token_ids)
        self.context_length = context

    def start(self, sequences: Sequence[Sequence[int]], room: int) -> Floats:
        """See ``TracedModel.start``; there is one sequence, and what it shares with the last one is not run again."""
        (ids,) = sequences
        shared = common_prefix(self._cached, ids[:-1])
        self._chain.kv.trim(self._chain.kv.length - shared)
        del self._cached[shared:]
        self._chain.reserve(len(ids) - shared)
        *parts, last = chunks(ids[shared:], PREFILL_ROWS)
        for part in parts:
            self._chain.forward(part, head_rows=0)
            self._cached += part
        return self._forward(last)

    def step(self, tokens: Sequence[int]) -> Floats:
        """See ``TracedModel.step``."""
        return self._forward(list(tokens))

    def keep(self, rows: Sequence[int]) -> None:
        """See ``TracedModel.keep``; there is but one."""

    def logits(self, hidden: Floats) -> Floats:
        """See ``TracedModel.logits``."""
        return np.array(self._chain.head(hidden), np.float32)

    def logit_cosine(self, hidden: Floats) -> Floats:
        """See ``TracedModel.logit_cosine``."""
        logits = self.logits(hidden[0])
        return cosine(logits, logits[-1:])[None]

    def _forward(self, ids: list[int]) -> Floats:
        states: Floats = self._chain.hidden_states(ids)[None].astype(np.float32)  # [1, P, D]
        self._cached += ids
        check_finite(states, self.depths, self.name)
        return states


def bundle_identity(manifest: Manifest) -> str:
    """A hash over those of the bundle's files."""
    files = {name: asdict(info) for name, info in manifest.files.items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
