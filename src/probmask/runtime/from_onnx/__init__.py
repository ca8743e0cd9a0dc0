"""Networks from ONNX files, as modules of PyTorch that the engine compiles like any other."""
