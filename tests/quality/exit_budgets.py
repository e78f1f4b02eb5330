r"""What unverified exits cost in accuracy: thresholds chosen on some prompts, answers to others scored.

    python tests/quality/exit_budgets.py BUNDLE --tune gsm8k_train.jsonl.gz --test gsm8k_test.jsonl \
        --test humaneval.jsonl.gz --run-code

BUNDLE has trained exits. For every budget thresholds are chosen from the answers to the tune prompts, as ``eexport
calibrate`` does; then the test prompts and the built-in JSON ones are answered in full and under each rule.
``--entropy`` adds rules that no budget stands behind, to show what exits cost where nobody bounds it.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from eexport.calibration.accuracy import Change, Marker, full_record, measure_rules
from eexport.calibration.data import Encoded, builtin_prompts, encode, interleave, read_prompts
from eexport.calibration.exit_slots import ExitSlots
from eexport.calibration.texts import slot_count
from eexport.calibration.thresholds import Budget, Chosen, choose
from eexport.runtime.console import Progress, print_table, progress
from eexport.runtime.device import open_backend
from eexport.runtime.engine import load_codec
from eexport.runtime.exits import ExitRule
from eexport.runtime.manifest import Manifest, read_manifest
from eexport.runtime.text import TextCodec

BUDGETS = ("0.1pp", "0.5pp", "2pp", "0.5%tokens", "1%tokens", "2%tokens", "5%tokens")
LONGEST_PROMPT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tune", type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("--test", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--tune-prompts", type=int, default=800)
    parser.add_argument("--test-prompts", type=int, default=300, help="of each file")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument(
        "--entropy", type=float, action="append", default=[], help="a threshold for every exit, in nats"
    )
    parser.add_argument("--run-code", action="store_true", help="run code that the model wrote, to score it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    given = parser.parse_args()
    manifest = read_manifest(given.bundle)
    codec = load_codec(given.bundle, manifest)
    tune = prompts_of(given.tune, codec, manifest)[: given.tune_prompts]
    test = [p for path in given.test for p in prompts_of([path], codec, manifest)[: given.test_prompts]]
    built_in, _ = encode(builtin_prompts().prompts, codec, manifest.model.bos_token_id, LONGEST_PROMPT)
    test += [prompt for prompt in built_in if prompt.prompt.kind == "json"]
    capacity = max(len(prompt.ids) for prompt in (*tune, *test)) + given.tokens
    slots = ExitSlots(given.bundle, manifest, open_backend("cpu", None), slot_count(manifest, capacity), capacity)
    mark = Marker(codec.decode, given.run_code)
    with progress("answering") as step:
        chosen = choose_rules(slots, tune, given.tokens, given.confidence, mark, step)
        rules = {name: found.rule for name, found in chosen.items() if found.rule.exits}
        for entropy in given.entropy:
            rules[f"entropy < {entropy:g}"] = ExitRule((entropy,) * slots.exits, math.inf)
        _, changes = measure_rules(slots, test, rules, given.tokens, mark, step)
    for name, found in chosen.items():
        print(f"{name}: {found.reason}")
    groups = {name: {**found.sources, "all": found.all} for name, found in changes.items()}
    print_table(
        ("budget", "test prompts", "left early", "layers", "same text", "right", "change, points"),
        [(name, source, *_cells(change)) for name, found in groups.items() for source, change in found.items()],
        left=2,
    )
    if given.json is not None:
        result = {
            "chosen": {name: dataclasses.asdict(found) for name, found in chosen.items()},
            "test": {name: {s: dataclasses.asdict(c) for s, c in found.items()} for name, found in groups.items()},
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def prompts_of(paths: Sequence[Path], codec: TextCodec, manifest: Manifest) -> list[Encoded]:
    """The files' prompts, shuffled."""
    encoded, _ = encode(read_prompts(paths).prompts, codec, manifest.model.bos_token_id, LONGEST_PROMPT)
    return interleave(encoded, seed=0)


def choose_rules(
    slots: ExitSlots, tune: Sequence[Encoded], tokens: int, confidence: float, mark: Marker, step: Progress
) -> dict[str, Chosen]:
    """A rule for each budget."""
    full, _ = measure_rules(slots, tune, {}, tokens, mark, step)
    traces = full_record(slots, tune, full).traces(full.correct)
    return {name: choose(traces, Budget.parse(name), confidence) for name in BUDGETS}


def _cells(change: Change) -> tuple[str, ...]:
    right, points = "", ""
    if change.before is not None and change.after is not None and change.accuracy is not None:
        right = f"{change.before:.1%} to {change.after:.1%} of {change.scored}"
        points = f"{change.accuracy.value:+.1f} ({change.accuracy.low:+.1f} to {change.accuracy.high:+.1f})"
    return f"{change.left:.1%}", f"{change.layers:.1f}", f"{change.same:.0%}", right, points


if __name__ == "__main__":
    main()
