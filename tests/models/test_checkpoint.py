"""Opening Hugging Face folders: what is accepted, and the one line that says why not."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import edit_config, edit_tensors, make_checkpoint

from eexport.models import checkpoint as checkpoint_module
from eexport.models.checkpoint import open_checkpoint
from eexport.models.errors import CheckpointError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def refusal(path: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_open_reads_everything(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 5]}
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "m", dtype=torch.bfloat16, generation=generation))
    assert checkpoint.spec.eos_token_ids == (2, 5)
    assert checkpoint.sampling == {"temperature": 0.6}
    assert checkpoint.source == {"name": "m", "format": "safetensors", "dtypes": "BF16 29"}
    assert checkpoint.weights.names() == checkpoint.spec.tensor_shapes().keys()
    assert checkpoint.tokenizer.special == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = open_checkpoint(make_checkpoint(tmp_path, dtype=dtype, shards=2)).weights
    tensors = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    assert len(list(tmp_path.glob("*.safetensors"))) >= 2
    for name, tensor in tensors.items():
        values = weights.read(name)
        assert values.dtype == np.float32 and values.flags.c_contiguous and values.flags.writeable
        assert weights.shape(name) == values.shape
        np.testing.assert_array_equal(values, tensor.float().numpy())


def test_padded_vocabulary(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab=352)
    assert open_checkpoint(edit_config(tmp_path, vocab_size=320)).spec.vocab_size == 352


def test_untied_without_head(tmp_path: Path) -> None:
    edit_tensors(make_checkpoint(tmp_path, tied=False), lambda tensors: tensors.pop(HEAD))
    message = refusal(tmp_path)
    assert HEAD in message and "tie_word_embeddings" in message


def test_tied_with_a_differing_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tied=False)
    message = refusal(edit_config(tmp_path, tie_word_embeddings=True))
    assert HEAD in message and "set it to false" in message


def test_tied_with_an_equal_head_and_old_buffers(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    checkpoint = open_checkpoint(edit_tensors(make_checkpoint(tmp_path), add))
    assert checkpoint.spec.tie_word_embeddings and HEAD not in checkpoint.spec.tensor_shapes()


@pytest.mark.parametrize(
    ("arch", "edit", "named"),
    [
        (
            "llama",
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            "q_proj.bias",
        ),
        ("qwen2", lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), "layers.1.self_attn.k_proj.bias"),
        (
            "qwen3",
            lambda t: t.pop("model.layers.2.self_attn.q_norm.weight"),
            "layers.2.self_attn.q_norm.weight",
        ),
        ("llama", lambda t: t.update({"model.norm.weight": torch.ones(32)}), "model.norm.weight (32,)"),
        (
            "llama",
            lambda t: t.update({"model.norm.weight": torch.ones(64).long()}),
            "model.norm.weight is stored as I64",
        ),
        ("llama", lambda t: [t.pop(n) for n in list(t) if "mlp" in n], "and 6 more"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, arch: str, edit: Callable[[dict[str, torch.Tensor]], object], named: str
) -> None:
    assert named in refusal(edit_tensors(make_checkpoint(tmp_path, arch), edit))


def test_missing_shard(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shards=3)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(tmp_path) and "missing" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0.99, 0.02, 4])
def test_truncated_shard(tmp_path: Path, keep: float) -> None:
    make_checkpoint(tmp_path, shards=3)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    assert shard.name in refusal(tmp_path) and "truncated" in refusal(tmp_path)


def test_damaged_header(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    for header in (b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8:])
        assert "model.safetensors: is truncated or not" in refusal(tmp_path)


def test_index_names_an_absent_tensor(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, shards=3) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"][EMBEDDING]
    path.write_text(json.dumps(index))
    message = refusal(tmp_path)
    assert "model.norm.weight" in message and index["weight_map"][EMBEDDING] in message


def test_folders_without_safetensors(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "convert them to safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    assert "neither model.safetensors nor" in refusal(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "x.gguf")
    assert "no config.json" in refusal(tmp_path) and "pass the .gguf file" in refusal(tmp_path)


def test_broken_config(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    for text in ("{", "[]", ""):
        (tmp_path / "config.json").write_text(text)
        assert "config.json" in refusal(tmp_path)


def test_non_ascii_folder(tmp_path: Path) -> None:
    assert open_checkpoint(make_checkpoint(tmp_path / "Modèle 模型 #1")).source["name"] == "Modèle 模型 #1"


def test_names_that_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file or folder" in refusal(tmp_path / "nowhere")
    folder = make_checkpoint(tmp_path / "m")
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    assert open_checkpoint("org/name-1.0").source["name"] == "m"

    def fail(name: str, allow_patterns: list[str]) -> str:
        raise OSError("offline\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert refusal("org/name").endswith("(offline)")


def test_only_one_tensor_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening looks at headers only; values are read when asked for."""
    monkeypatch.setattr(np, "memmap", lambda *args, **kwargs: pytest.fail("a tensor was read"))
    assert checkpoint_module.open_checkpoint(make_checkpoint(tmp_path, shards=2)).spec.num_layers == 3
