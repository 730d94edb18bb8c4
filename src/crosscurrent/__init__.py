"""crosscurrent: prove that multi-stream CUDA code in PyTorch is right."""

__version__ = "0.1.0"
