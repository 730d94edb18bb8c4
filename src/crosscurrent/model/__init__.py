"""A compact transformer, with explicit backward passes where the gradient needs them: see ``transformer``."""
