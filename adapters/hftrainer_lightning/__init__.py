"""hftrainer's engine on PyTorch Lightning: the one place that imports `lightning`.

Importing this package imports neither `lightning` nor `torch`; `import_lightning` and its modules do.
"""

from hftrainer_lightning.lean_import import import_lightning as import_lightning
