"""Ranks and launchers, the process group, devices, and how a model is sharded over them."""
