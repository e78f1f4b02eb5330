"""Speculation by n-gram lookup: the gain that the probe predicts beside the measured one, and whether tokens stay.

    python tests/quality/predicted_lookup.py BUNDLE --prompts 16 --tokens 150

A bare loop over the chain drafts by lookup and verifies in one step, on the probe's own prompts; the prediction
replays the same texts against a cost table measured just before.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eexport.calibration.data import builtin_prompts, encode, interleave
from eexport.calibration.drafts import Policy, Recorded, Replay
from eexport.calibration.predict import geometric_mean
from eexport.runtime.chain import Chain
from eexport.runtime.costs import measure_costs
from eexport.runtime.device import open_backend
from eexport.runtime.engine import PREFILL_ROWS, Engine, chunks, common_prefix, load_codec
from eexport.runtime.manifest import read_manifest
from eexport.runtime.ngram import NgramIndex


def decode(chain: Chain, prompt: Sequence[int], tokens: int, drafted: int) -> tuple[list[int], float]:
    """Greedy tokens after ``prompt`` with up to ``drafted`` looked up each time, and the seconds after the first."""
    chain.reset()
    chain.reserve(len(prompt) + tokens + drafted)
    for part in chunks(prompt[:-1], PREFILL_ROWS):
        chain.forward(part, head_rows=0)
    output = [int(chain.forward(prompt[-1:])[0].argmax())]
    index = NgramIndex()
    index.extend([*prompt, *output])
    started = time.perf_counter()
    while len(output) < tokens:
        draft = index.propose(drafted) if drafted else []
        best = chain.forward([output[-1], *draft], 1 + len(draft)).argmax(-1).tolist()
        accepted = common_prefix(draft, best)
        chain.kv.trim(len(draft) - accepted)
        made = best[: accepted + 1][: tokens - len(output)]
        output += made
        index.extend(made)
    return output, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--drafted", type=int, default=7)
    args = parser.parse_args()
    manifest, backend = read_manifest(args.bundle), open_backend("cpu")
    codec = load_codec(args.bundle, manifest)
    replay = Replay(measure_costs(Engine.load(args.bundle, backend=backend)))
    chain = Chain(args.bundle, manifest, backend, 2048)
    encoded, _ = encode(builtin_prompts().prompts, codec, manifest.model.bos_token_id, 1024)
    gains: dict[str, list[tuple[float, float]]] = {}
    for prompt in interleave(encoded, seed=0)[: args.prompts]:
        plain, plain_seconds = decode(chain, prompt.ids, args.tokens, 0)
        looked_up, seconds = decode(chain, prompt.ids, args.tokens, args.drafted)
        if plain != looked_up:
            raise SystemExit(f"{prompt.prompt.source}: other tokens with lookup than without")
        nothing = np.zeros((len(plain), 1))
        text = Recorded(prompt.ids, tuple(plain), nothing.astype(bool), nothing.astype(np.float32))
        predicted = replay(Policy("full"), text).ms / replay(Policy("exact", lookup=args.drafted), text).ms
        gains.setdefault(prompt.prompt.kind, []).append((plain_seconds / seconds, predicted))
    gains["all"] = [gain for kind in gains.values() for gain in kind]
    for kind, found in gains.items():
        measured, predicted = (geometric_mean(column) for column in zip(*found, strict=True))
        print(f"{kind:6} measured {measured:.2f}x  predicted {predicted:.2f}x")


if __name__ == "__main__":
    main()
