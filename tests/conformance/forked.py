"""Runs many short scripts, each in a process forked from this one, which has imported what takes long.

python forked.py < scripts.json: a list of programs; prints a list of [status, stdout, stderr].
"""

import json
import os
import sys
import tempfile
import traceback


def run(program: str) -> list:
    """What a program shows, and how it ends."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                exec(program, {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        shown = []
        for file in (out, err):
            file.seek(0)
            shown.append(file.read().decode())
    return [status, *shown]


if __name__ == "__main__":
    programs = json.load(sys.stdin)
    import lightning.pytorch  # noqa: F401
    import transformers.trainer  # noqa: F401

    print(json.dumps([run(program) for program in programs]))
