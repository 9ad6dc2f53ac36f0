"""Runs `accelerate` as if this machine had two GPUs, with the file CONFIGURED from `accelerate config`, or none.

With fewer GPUs it would start one process, whatever is asked for.
"""

import os

import torch
from accelerate.commands import launch
from accelerate.commands.accelerate_cli import main
from accelerate.commands.config import config_args

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
launch.default_config_file = config_args.default_config_file = os.environ.get("CONFIGURED", "")

if __name__ == "__main__":
    main()
