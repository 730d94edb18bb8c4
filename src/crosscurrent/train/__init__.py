"""Training on text: documents, optimizer steps, checkpoints."""
