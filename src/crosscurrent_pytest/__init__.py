"""The pytest plugin: watches tests for races between CUDA streams, pinned memory and the host.

It is always loaded where crosscurrent is installed, so it imports nothing but pytest until a test asks for it
(``-p no:crosscurrent`` switches it off). ``plugin`` holds the options and hooks, ``wishes`` what a test asks
for, ``body`` watches a test's body, ``failures`` says what was wrong with it.
"""
