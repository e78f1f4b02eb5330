"""Checkpoints: what a decoder is, its weights and tokenizer, and a reference implementation in torch."""
