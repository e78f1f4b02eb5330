"""Build every peer's form of one GGUF checkpoint, and the fp32 reference to judge their outputs by.

    .venv-peers/bin/python tests/peers/prepare.py model.gguf .cache/peers

fills ``.cache/peers/<model>-<hash>/`` (what is there already is kept) and prints that folder's path last:

    hf/                     the dequantised weights, fp32, as a Hugging Face folder
    hf/reference.json       prompts with the fp32 model's greedy tokens; a long text's ids for timing
    genai-<form>/           onnxruntime-genai's own builds (GENAI_FORMS)
    llamacpp-<form>.gguf    llama.cpp's requantised files (LLAMACPP_FORMS)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Precision and options of onnxruntime-genai's builder. accuracy_level 4 (int8 activations), fused gate/up
# projections and a head that runs on the last position only are its fastest settings; algo_config rtn and
# k_quant, int8 heads, unfused QKV and unshared embeddings were no faster.
GENAI_COMMON = {"accuracy_level": "4", "fuse_mlp_gate_up": "true", "prune_lm_head": "true"}
GENAI_FORMS = {
    "int4-b32": ("int4", {"block_size": "32"}),
    "int4-b64": ("int4", {"block_size": "64"}),
    "int4-b128": ("int4", {"block_size": "128"}),
    "int8-b32": ("int8", {"block_size": "32"}),
    "int8-b128": ("int8", {"block_size": "128"}),
}
# llama.cpp's file type and whether the embedding and the head take that type too ("pure").
LLAMACPP_FORMS = {
    "q4_0": ("Q4_0", False),
    "q4_0-pure": ("Q4_0", True),
    "q8_0": ("Q8_0", True),
}
PROMPTS = (
    "Explain in a few sentences why the sky is blue during the day and red at sunset.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and two doctests.",
    "A shop sells pens at 3 for 2 euros. How much do 18 pens cost? Show every step.",
    'Return a JSON object with the keys "name", "age", "city" and "languages" for a made-up person.',
)
REFERENCE_TOKENS = 24
TIMING_TEXT = Path(__file__).parents[2] / "LICENSE"
TIMING_TOKENS = 2048


def model_folder(gguf: Path, cache: Path) -> Path:
    """Return the cache folder of this file's content."""
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return cache / f"{gguf.stem}-{digest.hexdigest()[:12]}"


def once(target: Path, build: Callable[[Path], None]) -> None:
    """Run ``build(scratch)`` and move its product to ``target``, unless target exists."""
    if target.exists():
        return
    scratch = target.with_name(f"part-{target.name}")
    if scratch.is_dir():
        shutil.rmtree(scratch)
    print(f"  {target.name}", flush=True)
    build(scratch)
    scratch.rename(target)


def write_huggingface(gguf: Path, folder: Path) -> None:
    """Write the checkpoint's dequantised fp32 weights, tokenizer and the reference outputs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain fp32 now, but transformers still refuses to save what came from GGUF.
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.chat_template is None:
        raise SystemExit(f"{gguf}: no chat template; the peers are compared on an instruct model")
    tokenizer.save_pretrained(folder)

    references = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        output = model.generate(torch.tensor([ids]), max_new_tokens=REFERENCE_TOKENS, do_sample=False)
        greedy = output[0, len(ids) :].tolist()
        # Some peers cannot be asked for EOS.
        greedy = [token for token in greedy if token != tokenizer.eos_token_id]
        references.append({"prompt_ids": ids, "greedy_ids": greedy})
    timing = tokenizer.encode(TIMING_TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    reference = {"prompts": references, "timing_ids": timing[:TIMING_TOKENS]}
    (folder / "reference.json").write_text(json.dumps(reference), encoding="utf-8")


def build_genai(source: Path, precision: str, options: dict[str, str], folder: Path) -> None:
    """Run onnxruntime-genai's model builder on the Hugging Face folder."""
    pairs = [f"{key}={value}" for key, value in (GENAI_COMMON | options | {"hf_token": "false"}).items()]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(source), "-o", str(folder), "-p", precision, "-e", "cpu"]
    command += ["-c", str(folder.parent / "part-builder"), "--extra_options", *pairs]
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        status = subprocess.run(command, stdout=output, stderr=output, env=environment, check=False).returncode
    if status != 0:
        raise SystemExit(f"onnxruntime-genai's builder failed on {folder.name}; see {log}")
    log.unlink()


def requantize(gguf: Path, ftype: str, pure: bool, target: Path) -> None:
    """Requantise a GGUF file with llama.cpp."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{ftype}")
    params.allow_requantize = True
    params.pure = pure
    if llama_cpp.llama_model_quantize(str(gguf).encode(), str(target).encode(), params) != 0:
        raise SystemExit(f"llama.cpp could not requantise {gguf} to {ftype}")


def main() -> None:
    """Prepare one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("cache", type=Path)
    args = parser.parse_args()
    if not args.gguf.is_file():
        raise SystemExit(f"{args.gguf}: no such GGUF file")
    folder = model_folder(args.gguf, args.cache)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"peers' models in {folder}", flush=True)
    once(folder / "hf", partial(write_huggingface, args.gguf))
    for form, (precision, options) in GENAI_FORMS.items():
        once(folder / f"genai-{form}", partial(build_genai, folder / "hf", precision, options))
    for form, (ftype, pure) in LLAMACPP_FORMS.items():
        once(folder / f"llamacpp-{form}.gguf", partial(requantize, args.gguf, ftype, pure))
    shutil.rmtree(folder / "part-builder", ignore_errors=True)
    print(folder)


if __name__ == "__main__":
    main()
