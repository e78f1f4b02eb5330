"""A tokenizer.json from GGUF metadata, which holds the vocabulary but only names the splitting rules."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from eexport.models.errors import CheckpointError
from eexport.models.gguf_file import GgufFile
from eexport.models.tokenizer import TokenizerFiles

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre to the patterns applied one after the other; the last is llama.cpp's where none is named.
_SPLITS = {
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "qwen2": [_QWEN2],
    "llama-bpe": [_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}
_SPLITS["llama3"] = _SPLITS["llama-bpe"]
_LLAMA3 = ("llama-bpe", "llama3")

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_from_gguf(file: GgufFile) -> TokenizerFiles:
    """Build the tokenizer of `file`; a model or splitting rule that is not known is refused by name."""
    metadata = file.metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens: list[str] = _required(file, "tokens")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens, types, pre), pre in _LLAMA3
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(file, tokens, types), True
    else:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.model {model!r} is not supported (known: gpt2, llama)")
    added = [(i, kind) for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(tokens[i], special=kind == _CONTROL, normalized=False) for i, kind in added])
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and (bos := special.get("bos_token")):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, ids["bos_token"])]
        )
    return TokenizerFiles(tokenizer.to_str(), metadata.get("tokenizer.chat_template"), special)


def _required(file: GgufFile, name: str) -> list[Any]:
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values:
        raise CheckpointError(f"{file.path}: has no tokenizer.ggml.{name}; convert it again with its tokenizer")
    return values


def _byte_level(file: GgufFile, tokens: list[str], types: list[int], pre: str) -> Tokenizer:
    """GPT-2 style BPE over bytes."""
    if pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise CheckpointError(f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported (known: {known})")
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    # A merge is "left right", and neither side holds a space: bytes are written as printable characters.
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _required(file, "merges"))]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece BPE: merges follow from the scores, unknown characters fall back to byte tokens."""
    scores: list[float] = _required(file, "scores")
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    normal = {token: i for token, i in vocab.items() if types[i] == _NORMAL}
    ranked = sorted(
        (-scores[i], i, token[:cut], token[cut:])
        for token, i in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    )
    unknown = next((token for token, i in vocab.items() if types[i] == _UNKNOWN), None)
    merges = [(left, right) for _, _, left, right in ranked]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
