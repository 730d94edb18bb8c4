"""What was found, to be read: in the terminal, as a page, as a trace for Perfetto; and how much overlapped.

``document`` is what all of them show; ``watched`` makes it of a watch. ``profile`` and ``overlap`` say how
much of the transfers was hidden, ``costs`` how long a modelled machine takes.
"""
