"""Tiny random checkpoints for tests, written by transformers itself, and their GGUF twins.

`make_checkpoint` and `make_scripted` write Hugging Face folders, `make_gguf` converts one, and `edit_config`
and `edit_tensors` break or vary one that is already written.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM

BOS, IM_START, IM_END = 0, 1, 2
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
FIRST_BYTE = len(SPECIAL)  # the token of byte b, in the order of the byte-level alphabet, follows
_MERGES = (
    "Ġ t|h e|i n|Ġ a|r e|o n|Ġt he|e r|Ġ s|a t|e n|Ġ c|o r|e s|i s|Ġ w|i t|o u|a n|n d|Ġ f|in g|Ġ b|e d|Ġ o|"
    "Ġ p|l e|l o|Ġa nd|h i|he l|hel lo|w or|wor l|worl d|Ġ Ġ|ĠĠ ĠĠ|Ċ Ċ"
)
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def make_checkpoint(
    folder: Path,
    arch: str = "llama",
    *,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 96,
    vocab: int = 320,
    context: int = 512,
    tied: bool = True,
    rope: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    bos: bool = False,
    generation: Mapping[str, Any] | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a random checkpoint to `folder` and return it.

    `rope` is a `rope_parameters` mapping, `config` holds further config.json fields (`attention_bias=True`).
    With `bos` the tokenizer puts <s> before a text and the chat template starts with it. The tokenizer has
    fewer tokens than `vocab`, as padded checkpoints do. Every layer, norm and bias is large enough to matter.
    """
    model_config = AutoConfig.for_model(
        arch,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **(rope or {})},
        bos_token_id=BOS,
        eos_token_id=IM_END,
        **({"sliding_window": None} if arch == "mistral" else {}) | config,
    )
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith(".bias"):
                tensor.copy_(noise)
            else:
                tensor.copy_(noise * tensor.shape[1] ** -0.5)
    model.to(dtype)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    model.save_pretrained(folder, max_shard_size=size if shards == 1 else size // shards)
    _write_tokenizer(folder, bos)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": IM_END, **(generation or {})}))
    return folder


def make_scripted(folder: Path, transitions: Mapping[int, int], *, default: int = IM_END, **options: Any) -> Path:
    """A checkpoint whose next token depends on the current one alone: `transitions`, else `default`.

    Attention and MLP add nothing, each token has its own dimension, and the head looks up what follows.
    """
    vocab = options.pop("vocab", 320)
    make_checkpoint(folder, vocab=vocab, hidden=vocab, tied=False, **options)
    following = torch.tensor([transitions.get(token, default) for token in range(vocab)])

    def script(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        tensors["model.norm.weight"].fill_(1.0)
        tensors["model.embed_tokens.weight"].copy_(torch.eye(vocab))
        tensors["lm_head.weight"].copy_(torch.nn.functional.one_hot(following, vocab).T)

    return edit_tensors(folder, script)


def edit_config(folder: Path, file: str = "config.json", **changes: Any) -> Path:
    """Set fields of a JSON file of a written checkpoint; `...` removes one."""
    path = folder / file
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Let `edit` change, add or remove tensors of a written, unsharded checkpoint in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def byte_id(byte: int) -> int:
    """The id of the token that stands for one byte alone."""
    return FIRST_BYTE + sorted(pre_tokenizers.ByteLevel.alphabet()).index(_byte_characters()[byte])


def make_gguf(path: Path, folder: Path, quant: str = "F32") -> Path:
    """Convert the tiny checkpoint in `folder` as llama.cpp's converter would; norms and biases stay F32.

    `quant` is F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1 and applies to every matrix.
    """
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, "llama" if config.model_type == "mistral" else config.model_type)
    _write_metadata(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[writer.arch.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            values = tensor.float().numpy()
            stem, kind = name.rsplit(".", 1)
            if writer.arch == "llama" and (count := heads.get(stem.rsplit(".", 1)[-1])):
                halves = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            dtype = gguf.GGMLQuantizationType[quant if values.ndim == 2 else "F32"]
            data = gguf.quants.quantize(np.ascontiguousarray(values), dtype)
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", data, raw_dtype=dtype)
    _write_rope(writer, config)
    _write_gguf_tokenizer(writer, folder, config.vocab_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(folder: Path, bos: bool) -> None:
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES.split("|"))]
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[BOS]} $A", pair=f"{SPECIAL[BOS]} $A $B", special_tokens=[(SPECIAL[BOS], BOS)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[IM_END]}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text(("{{ bos_token }}" if bos else "") + _CHAT_TEMPLATE)


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _write_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif rope["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())


def _write_gguf_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab: int) -> None:
    state = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    padding = [f"[PAD{i}]" for i in range(len(tokens), vocab)]
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(state["post_processor"] is not None)
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))
