"""Measures the long-context gradient: named configurations, their roofline, the flag off against on.

`counts` counts what a configuration has to compute and to move, with integers only; `rates` measures how
fast this machine multiplies and copies; `roofline` puts the two together; `runner` measures the gradient
itself; `comparison` says whether off and on gave the same bits; `document` and `page` write it all down.

Like `suite` and `cli`, this package joins the gradient and the reports, which do not know each other.
"""
