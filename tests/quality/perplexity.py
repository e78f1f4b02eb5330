"""How far bundles are from the fp32 bundle of the same model, on held-out text.

    python tests/quality/perplexity.py BUNDLE... --reference FP32_BUNDLE --data text.jsonl --data more.jsonl.gz

Every text is read once, each token predicted from the true ones before it (teacher-forced): how often the likeliest
token is the reference's, the mean KL divergence of the reference's distribution from the bundle's, and perplexity.
A row of a data file has ``text``, ``question`` and ``answer``, ``prompt`` and ``canonical_solution``, or ``turns``.
"""

import argparse
import gzip
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eexport.runtime.engine import Engine

Logits = NDArray[np.float32]


@dataclass
class Score:
    """Sums over the predicted tokens, in nats."""

    bundle: str
    tokens: int = 0
    agreed: int = 0
    kl: float = 0.0
    surprise: float = 0.0

    def add(self, found: Logits, expected: Logits, targets: NDArray[np.int64]) -> None:
        """Count T places: log-probabilities [T, V] of bundle and reference, and the tokens [T] that came."""
        self.tokens += len(targets)
        self.agreed += int((found.argmax(-1) == expected.argmax(-1)).sum())
        self.kl += float((np.exp(expected) * (expected - found)).sum(-1).sum(dtype=np.float64))
        self.surprise -= float(found[np.arange(len(targets)), targets].sum(dtype=np.float64))

    def figures(self) -> dict[str, Any]:
        """What is reported; ``agreement_error`` is the standard error of ``agreement``."""
        agreement = self.agreed / self.tokens
        return {
            "bundle": self.bundle,
            "tokens": self.tokens,
            "agreement": agreement,
            "agreement_error": math.sqrt(agreement * (1 - agreement) / self.tokens),
            "mean_kl": self.kl / self.tokens,
            "perplexity": math.exp(self.surprise / self.tokens),
        }


def main() -> None:
    args = _arguments()
    reference, *others = (_load(path, args) for path in (args.reference, *args.bundles))
    vocab = reference.manifest.model.vocab_size
    for path, engine in zip(args.bundles, others, strict=True):
        if engine.manifest.model.vocab_size != vocab:
            raise SystemExit(f"{path}: has another vocabulary than {args.reference}, so it is another model")
    scores = [Score(path.name) for path in (args.reference, *args.bundles)]
    texts = read_texts(args.data, reference, args.tokens, args.window)
    for ids in texts:
        targets = np.array(ids[1:])
        expected = log_probabilities(reference.score(ids[:-1]))
        for score, engine in zip(scores, (reference, *others), strict=True):
            found = expected if engine is reference else log_probabilities(engine.score(ids[:-1]))
            score.add(found, expected, targets)
    figures = [score.figures() for score in scores]
    print(f"{len(texts)} texts\n\n{table(figures)}")
    if args.json:
        settings = {"data": [path.name for path in args.data], "texts": len(texts), "window": args.window}
        args.json.write_text(json.dumps({**settings, "bundles": figures}, indent=1) + "\n", encoding="utf-8")


def log_probabilities(logits: NDArray[Any]) -> Logits:
    """Logits [T, V] as natural logs of probabilities."""
    shifted = logits.astype(np.float32)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def read_texts(files: list[Path], engine: Engine, tokens: int, window: int) -> list[list[int]]:
    """Token ids of texts in a fixed random order, from each file an equal share of ``tokens`` predictions."""
    texts: list[list[int]] = []
    for share, path in enumerate(files, 1):
        rows = list(read_rows(path))
        random.Random(0).shuffle(rows)
        predictions = sum(map(len, texts)) - len(texts)
        for row in rows:
            room = tokens * share // len(files) - predictions
            if room <= 0:
                break
            ids = engine.codec.encode(text_of(row, path))[: min(window, room) + 1]
            if len(ids) > 1:
                texts.append(ids)
                predictions += len(ids) - 1
    return texts


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a .jsonl file, plain or gzipped."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def text_of(row: dict[str, Any], path: Path) -> str:
    """The text of a row, by the fields that it has."""
    match row:
        case {"text": str(text)}:
            return text
        case {"question": str(question), "answer": str(answer)}:
            return f"{question}\n{answer}"
        case {"prompt": str(prompt), "canonical_solution": str(solution)}:
            return prompt + solution
        case {"turns": [*turns]}:
            return "\n\n".join(turns)
    raise SystemExit(f"{path}: a row has {', '.join(row)}, none of the fields that this script knows (see --help)")


def table(figures: list[dict[str, Any]]) -> str:
    """The figures as Markdown; the first line is the reference."""
    rows = ["| bundle | tokens | argmax agreement | mean KL | perplexity |", "|---|---|---|---|---|"]
    for f in figures:
        agreement = f"{100 * f['agreement']:.1f}% ± {100 * f['agreement_error']:.1f}"
        rows.append(f"| {f['bundle']} | {f['tokens']} | {agreement} | {f['mean_kl']:.4f} | {f['perplexity']:.2f} |")
    return "\n".join(rows)


def _load(path: Path, args: argparse.Namespace) -> Engine:
    return Engine.load(path, device="cpu", threads=args.threads, context=args.window + 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("bundles", type=Path, nargs="+", metavar="BUNDLE")
    add("--reference", type=Path, required=True, help="the fp32 bundle")
    add("--data", type=Path, required=True, action="append", help="a .jsonl or .jsonl.gz file; may be repeated")
    add("--tokens", type=int, default=6000, help="how many predictions, over all files")
    add("--window", type=int, default=512, help="the most tokens of one text")
    add("--threads", type=int)
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
