"""The script of `tests/distributed`, where gloo does for DeepSpeed."""

from tests.adapters.deepspeed.training_cases import without_compiler
from tests.support.launched_script import main

if __name__ == "__main__":
    without_compiler()
    main()
