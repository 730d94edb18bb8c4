"""What a program does to memory and streams, as a trace of plain integers.

``records`` is what a trace is made of. ``tracer`` (ops), ``sync`` (streams, events, graphs, the host) and
``recorder`` (lanes, storages) make the records; ``access`` reads schemas, ``copies`` and ``waits`` hold the
rules of copies and of ops that make the host wait, ``arrays`` follows pinned memory into NumPy. They are told
what happens by ``simulate`` (a machine without a GPU) or by ``cuda`` (a real one).
"""
