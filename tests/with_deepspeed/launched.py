"""The script of `tests/distributed`, where gloo does for DeepSpeed."""

from tests.distributed.launched import main
from tests.with_deepspeed.sets import without_compiler

if __name__ == "__main__":
    without_compiler()
    main()
