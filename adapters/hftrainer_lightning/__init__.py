"""hftrainer's engine on PyTorch Lightning: the one place that imports `lightning`.

Importing this package imports neither `lightning` nor `torch`; its modules do.
"""
