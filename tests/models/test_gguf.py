"""GGUF files: the same model as the folder they were converted from, or a refusal."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny import make_checkpoint, make_gguf

from eexport.models.checkpoint import open_checkpoint
from eexport.models.decoder import Decoder
from eexport.models.errors import CheckpointError
from eexport.models.gguf_file import read_gguf
from eexport.models.gguf_weights import open_gguf_weights

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def logits(path: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    ids = torch.randint(0, 300, (1, 200), generator=torch.Generator().manual_seed(1))
    return Decoder.from_weights(checkpoint.spec, checkpoint.weights)(ids)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tied": False}),
        ("llama", {"rope": LLAMA3}),
        ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
        ("mistral", {"head_dim": 32, "kv_heads": 1}),
        ("qwen2", {"tied": False}),
        ("qwen2", {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
        ("qwen3", {"head_dim": 32, "kv_heads": 1}),
    ],
)
def test_same_model_as_the_folder(tmp_path: Path, arch: str, options: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path / "hf", arch, **options)
    path = make_gguf(tmp_path / "m.gguf", folder)
    torch.testing.assert_close(logits(path), logits(folder), rtol=0, atol=1e-5)
    spec, original = open_checkpoint(path).spec, open_checkpoint(folder).spec
    assert spec.tensor_shapes() == original.tensor_shapes()
    assert (spec.context_length, spec.eos_token_ids, spec.bos_token_id) == (512, (2,), 0)


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_quantised_values(tmp_path: Path, quant: str) -> None:
    folder = make_checkpoint(tmp_path / "hf")
    checkpoint = open_checkpoint(make_gguf(tmp_path / "m.gguf", folder, quant))
    name = "model.layers.1.self_attn.k_proj.weight"  # its rows are reordered, too
    values, exact = checkpoint.weights.read(name), open_checkpoint(folder).weights.read(name)
    assert checkpoint.weights.dtype(name) == quant
    assert values.dtype == np.float32 and values.flags.c_contiguous and values.shape == exact.shape
    bits = int(quant[1]) if quant.startswith("Q") else 8
    assert np.abs(values - exact).max() < np.abs(exact).max() * 2.0 ** (1 - bits)
    assert checkpoint.source["dtypes"].startswith(quant)


@pytest.mark.parametrize("quant", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_decoded_in_place(tmp_path: Path, quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("first", np.ones(5, dtype=np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    _finish(writer)
    weights = open_gguf_weights(read_gguf(tmp_path / "m.gguf"), {})
    name = "model.layers.0.mlp.up_proj.weight"
    assert weights.shape(name) == (3, 512) and weights.dtype(name) == quant
    np.testing.assert_array_equal(weights.read(name), gguf.quants.dequantize(raw, kind))


def test_every_unsupported_type_is_named(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", make_checkpoint(tmp_path / "hf"))
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    type_at = data.index(name) + len(name) + 4 + 2 * 8
    for number, text in ((16, "IQ2_XXS"), (12, "blocks"), (39, "MXFP4"), (999, "number 999")):
        data[type_at : type_at + 4] = number.to_bytes(4, "little")
        path.write_bytes(data)
        message = refusal(path)
        assert text in message and name.decode() in message


@pytest.mark.parametrize("part", [0.999, 0.5, 0.05, 0.01, 3])
def test_truncated(tmp_path: Path, part: float) -> None:
    path = make_gguf(tmp_path / "m.gguf", make_checkpoint(tmp_path / "hf"))
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data)) if part < 1 else int(part)])
    assert "truncated" in refusal(path)


def test_split_files(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m-00001-of-00003.gguf", make_checkpoint(tmp_path / "hf"))
    assert "--merge" in refusal(path)
    writer = gguf.GGUFWriter(tmp_path / "renamed.gguf", "llama")
    writer.add_uint16("split.count", 3)
    _finish(writer)
    assert "one of 3 splits" in refusal(tmp_path / "renamed.gguf")


def test_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK" + bytes(100))
    assert "not a GGUF file" in refusal(path)
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    assert "GGUF version" in refusal(path)
    _finish(gguf.GGUFWriter(path, "gemma3"))
    assert "general.architecture 'gemma3'" in refusal(path)
    _finish(gguf.GGUFWriter(path, "llama"))
    assert "hidden_size is missing" in refusal(path)
    other = tmp_path / "m.bin"
    other.write_bytes(b"")
    assert "neither a folder nor a .gguf file" in refusal(other)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("llama.rope.dimension_count", 8, "partial_rotary_factor"),
        ("llama.rope.scaling.factor", 2.0, ""),
        ("llama.attention.value_length", 8, "value_length"),
        ("llama.attention.sliding_window", 100, ""),
    ],
)
def test_metadata_that_changes_the_function(tmp_path: Path, key: str, value: float, named: str) -> None:
    from eexport.models.config import spec_from_config
    from eexport.models.gguf_config import config_from_gguf

    file = read_gguf(make_gguf(tmp_path / "m.gguf", make_checkpoint(tmp_path / "hf")))
    file.metadata[key] = value
    if named:
        with pytest.raises(CheckpointError, match=named):
            spec_from_config(config_from_gguf(file), {}, "m.gguf")
        return
    spec = spec_from_config(config_from_gguf(file), {}, "m.gguf")
    assert spec.rope.rope_type == ("linear" if "rope" in key else "default")
    assert spec.context_length == (100 if "window" in key else 512)


def test_unknown_tensors_are_not_ignored(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name in ("blk.0.ffn_gate_inp.weight", "blk.0.attn_q.weight", "output.weight", "v.patch"):
        writer.add_tensor(name, np.ones((2, 2), dtype=np.float32))
    _finish(writer)
    assert open_gguf_weights(read_gguf(tmp_path / "m.gguf"), {}).names() == {
        "blk.0.ffn_gate_inp.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "lm_head.weight",
        "v.patch",
    }


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
