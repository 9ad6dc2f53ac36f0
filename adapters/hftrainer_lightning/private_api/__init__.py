"""Every use of a private Lightning name, each with its reason. Checked against lightning 2.6.6.

There is one module for each part of Lightning; `tests/lightning/test_private_names.py` finds uses of Lightning's
private names anywhere else.
"""
