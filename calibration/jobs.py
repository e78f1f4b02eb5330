"""What texts a calibration has the model write: answers to given prompts, and to those that it completes itself."""

from collections.abc import Sequence

from eexport.calibration.corpus import Split
from eexport.calibration.data import Encoded
from eexport.calibration.generate import Job
from eexport.calibration.synthesis import Beginnings
from eexport.runtime.engine import common_prefix
from eexport.runtime.text import TextCodec

WRITTEN = "written"
"""Source of a text whose prompt the model completed itself."""

_MARK = "«PROMPT»"  # what no template says itself


def make_jobs(
    given: Sequence[Encoded], held_out: Sequence[Encoded], written: int, codec: TextCodec, seed: int
) -> list[Job]:
    """Every text, in the order in which they are written.

    Args:
        given: The user's prompts, to train, tune and test with; one that is held out as well is left out, and so is one
            that came before as another kind.
        held_out: Prompts to test with and nothing else.
        written: How many more prompts the model is to complete.
        codec: Its tokenizer and chat template.
        seed: Of what is completed.
    """
    before, closing = _turn(codec)
    kept = {encoded.ids for encoded in held_out}
    own: dict[tuple[int, ...], Encoded] = {}
    for encoded in given:
        if encoded.ids not in kept:
            own.setdefault(encoded.ids, encoded)
    jobs = [*(_given(one, before, "test") for one in held_out), *(_given(one, before, None) for one in own.values())]
    beginnings = Beginnings(seed)
    for index in range(written):
        beginning = beginnings[index]
        ids = (*before, *codec.encode(beginning.text, add_special=False))
        jobs.append(Job(beginning.kind, WRITTEN, ids, len(before), closing, seed=(seed << 32) + index))
    return jobs


def _given(encoded: Encoded, before: Sequence[int], split: Split | None) -> Job:
    source = encoded.prompt.source.rpartition(":")[0]
    first = min(common_prefix(encoded.ids, before), len(encoded.ids) - 1)
    return Job(encoded.prompt.kind, source, encoded.ids, first, split=split)


def _turn(codec: TextCodec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before a user's message and between it and the answer; with raw text, what its tokenizer adds."""
    if not codec.has_chat_template:
        ids = codec.encode("a")
        return tuple(ids[: common_prefix(ids, codec.encode(""))]), ()
    text = codec.render_chat([{"role": "user", "content": _MARK}])
    before, _, closing = text.partition(_MARK)
    return tuple(codec.encode(before, add_special=False)), tuple(codec.encode(closing, add_special=False))
