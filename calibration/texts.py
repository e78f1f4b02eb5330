"""The first stage of a calibration: what it works on, and the texts that the model writes for it."""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from eexport.calibration.corpus import Corpus, bytes_per_token
from eexport.calibration.data import Encoded, Skipped, builtin_prompts, encode, interleave, read_prompts
from eexport.calibration.generate import Job, Lengths, generate
from eexport.calibration.jobs import WRITTEN, make_jobs
from eexport.calibration.slots import Slots
from eexport.models.checkpoint import Checkpoint, checkpoint_identity
from eexport.models.exits import PREDICTOR_LAYERS
from eexport.runtime.console import Progress
from eexport.runtime.device import available_memory, open_backend
from eexport.runtime.errors import EexportError
from eexport.runtime.manifest import MANIFEST_NAME, Manifest, read_manifest
from eexport.runtime.text import TextCodec

BuildBundle = Callable[[Checkpoint, Path, Path | None, Progress], Manifest]
"""Builds a bundle of a checkpoint in a folder, with the calibration in another if that is given."""

_SLOTS = 64  # more are no faster
_LEAST_SPARE = 1 << 30  # disk that is left alone, in bytes


@dataclass(frozen=True)
class Request:
    """What to write texts from.

    Attributes:
        data: Files of prompts to train, tune and test with; none is fine.
        test_data: Files of prompts to test with and nothing else; none stands for the built-in ones.
        prompts: How many more prompts the model completes itself.
        prompt_tokens: Longer prompts are cut.
        lengths: Of answers, and of what the model adds to a prompt.
        precision: Of the bundle that writes.
        boundaries: Depths at which its blocks end, short of the model's own.
        max_disk: Most bytes that the texts may take.
        seed: Of what is sampled.
        threads: CPU threads; None is all that this process may use.
    """

    data: Sequence[Path] = ()
    test_data: Sequence[Path] = ()
    prompts: int = 3000
    prompt_tokens: int = 512
    lengths: Lengths = Lengths()
    precision: str = "int8"
    boundaries: tuple[int, ...] = ()
    max_disk: int = 12 << 30
    seed: int = 0
    threads: int | None = None


@dataclass(frozen=True)
class Opened:
    """A checkpoint with the texts to be written for it.

    Attributes:
        checkpoint: It.
        identity: ``checkpoint_identity`` of it.
        codec: Its tokenizer and chat template.
        jobs: The texts, in order.
        depths: Those of which the texts keep hidden states.
        prompts: Those that were given and not written, by their hash.
        skipped: Rows of the data that cannot be used.
        notes: What the user should know, a line each.
    """

    checkpoint: Checkpoint
    identity: str
    codec: TextCodec
    jobs: Sequence[Job]
    depths: Sequence[int]
    prompts: Mapping[str, Encoded]
    skipped: Sequence[Skipped]
    notes: Sequence[str]


def open_texts(checkpoint: Checkpoint, request: Request) -> Opened:
    """Read the data and plan the texts.

    Raises:
        EexportError: The data cannot be used, or there is no room for a useful number of texts.
    """
    spec, files = checkpoint.spec, checkpoint.tokenizer
    codec = TextCodec(
        Tokenizer.from_str(files.tokenizer_json), chat_template=files.chat_template, special=files.special
    )
    limit = min(request.prompt_tokens, spec.context_length - request.lengths.answer - 1)
    if limit < 1:
        raise EexportError(f"--tokens: an answer of {request.lengths.answer} does not fit in {spec.context_length}")
    skipped: list[Skipped] = []

    def prompts(files: Sequence[Path]) -> list[Encoded]:
        rows = read_prompts(files) if files else builtin_prompts()
        encoded, unusable = encode(rows.prompts, codec, spec.bos_token_id, limit)
        skipped.extend([*rows.skipped, *unusable])
        return interleave(encoded, request.seed)

    given = prompts(request.data) if request.data else []
    held_out = prompts(request.test_data)
    jobs = make_jobs(given, held_out, request.prompts, codec, request.seed)
    if all(job.split is not None for job in jobs):
        raise EexportError("there is nothing to train on: give --prompts, --data or both")
    if (longest := max(map(_tokens_of(request), jobs))) > spec.context_length:
        raise EexportError(
            f"--prompts: one that the model writes itself and its answer take up to {longest} tokens, the context is "
            f"{spec.context_length}: lower --tokens, or give 0 --prompts and --data"
        )
    depths = sorted({*range(1, min(PREDICTOR_LAYERS, spec.num_layers) + 1), *request.boundaries, spec.num_layers})
    kept, notes = _within(jobs, request, bytes_per_token(len(depths), spec.hidden_size))
    known = {encoded.hash: encoded for encoded in (*given, *held_out)}
    return Opened(checkpoint, checkpoint_identity(checkpoint), codec, kept, depths, known, skipped, notes)


def open_corpus(opened: Opened, request: Request, work: Path) -> Corpus:
    """The texts that are in ``work`` so far; none where it is new.

    Raises:
        EexportError: ``work`` holds other texts, or has no room for what is left to write.
    """
    given = repr([job for job in opened.jobs if job.source != WRITTEN])
    settings = {
        "format": 2,
        "checkpoint": opened.identity,
        "precision": request.precision,
        "depths": opened.depths,
        "answer_tokens": request.lengths.answer,
        "message_tokens": request.lengths.message,
        "seed": request.seed,
        "prompts": hashlib.sha256(given.encode()).hexdigest(),
    }
    corpus = Corpus(work, settings)
    if len(corpus) > len(opened.jobs):
        raise EexportError(
            f"{work}: holds {len(corpus)} texts and {len(opened.jobs)} are asked for: give as many --prompts as "
            "before, or another --work"
        )
    left = sum(map(_tokens_of(request), opened.jobs[len(corpus) :]))
    needed = left * bytes_per_token(len(opened.depths), opened.checkpoint.spec.hidden_size)
    free = shutil.disk_usage(work).free - _LEAST_SPARE
    if left and needed > free:
        raise EexportError(
            f"{work}: the texts take up to {needed / 1e9:.1f} GB and {max(0, free) / 1e9:.1f} GB are free: give fewer "
            "--prompts, or another --work"
        )
    return corpus


def write_texts(opened: Opened, request: Request, corpus: Corpus, bundle: Path, progress: Progress) -> None:
    """Have ``bundle`` write what ``corpus`` lacks of the texts. Raises EexportError where that cannot be."""
    left = opened.jobs[len(corpus) :]
    if not left:
        return
    manifest = read_manifest(bundle)
    count = slot_count(manifest, capacity := max(map(_tokens_of(request), left)))
    slots = Slots(bundle, manifest, open_backend("cpu", request.threads), count, capacity)
    generate(slots, opened.jobs, corpus, request.lengths, lambda done, total: progress("writing texts", done, total))


def built_bundle(
    opened: Opened, folder: Path, build: BuildBundle, calibration: Path | None, progress: Progress
) -> Path:
    """A bundle of the checkpoint in ``folder``; one that is there was built for the same work and is used."""
    if not (folder / MANIFEST_NAME).is_file():
        build(opened.checkpoint, folder, calibration, progress)
    return folder


def _within(jobs: list[Job], request: Request, token_bytes: int) -> tuple[list[Job], list[str]]:
    """As many of the jobs as the disk limit allows."""
    total, tokens_of = 0, _tokens_of(request)
    for index, job in enumerate(jobs):
        total += tokens_of(job) * token_bytes
        if total > request.max_disk:
            if index < len(jobs) // 10 or not any(job.split is None for job in jobs[:index]):
                raise EexportError(
                    f"--max-disk: {request.max_disk / 1e9:.1f} GB hold {index} of {len(jobs)} texts, too few to learn "
                    "from: give more"
                )
            return jobs[:index], [f"{index} of {len(jobs)} texts are used, as the others would exceed --max-disk"]
    return jobs, []


def _tokens_of(request: Request) -> Callable[[Job], int]:
    """Most tokens that a job's text can have."""
    lengths = request.lengths

    def tokens(job: Job) -> int:
        message = lengths.message + len(job.closing) if job.closing else 0
        return len(job.ids) + message + lengths.answer

    return tokens


def slot_count(manifest: Manifest, capacity: int) -> int:
    """As many slots of ``capacity`` tokens as a quarter of the free memory holds, and are of use.

    Raises:
        EexportError: Not one fits.
    """
    free = available_memory()
    fit = _SLOTS if free is None else free // 4 // (manifest.kv_bytes_per_token() * capacity)
    if fit < 1:
        raise EexportError(f"a text of {capacity} tokens does not fit in a quarter of the free memory: lower --tokens")
    return min(_SLOTS, fit)
