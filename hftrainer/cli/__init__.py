"""`python -m hftrainer`: one module per subcommand, the launcher, and `install()`."""
