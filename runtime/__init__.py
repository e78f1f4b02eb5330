"""What goes on the device: ``eexport.runtime.engine.Engine`` runs a bundle. No torch, no transformers, no onnx."""
