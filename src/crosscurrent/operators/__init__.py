"""The operators that the model and the caches are fast with: PyTorch operators, one kernel or a few each.

Each has a schema, so that traces, profiles and replays see it as one step with what it reads and writes, and
two versions, between which PyTorch chooses by where the memory is:

- on a CPU plain PyTorch, which is what the operator means, and what the other version is checked against;
- on CUDA a Triton kernel, or fused kernels that PyTorch brings along.

`attention`, `rows` and `rotation` hold the operators and the plain versions, `*_triton` and `*_cuda` the
others. They know nothing of models and caches.
"""
