"""From checkpoint to bundle, and the ``eexport`` command. Imports models and runtime."""
