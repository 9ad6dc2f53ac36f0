import importlib.util

#: `make test-deepspeed` has an environment of its own for these.
collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["test_*.py"]
