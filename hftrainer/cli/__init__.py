"""`python -m hftrainer`: a module for each subcommand, launching, and `install()`."""
