"""KV caches of bounded size: what they forget (``policies``), and how they store the rest (``quantize``).

``names`` has what a user writes, ``placement`` and ``replay_log`` let a backward pass evict the same again.
"""
