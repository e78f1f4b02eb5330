"""Measuring the room for early exit, and training what makes room. Imports models and runtime."""
