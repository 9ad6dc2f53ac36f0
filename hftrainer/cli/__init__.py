"""`python -m hftrainer`: run, explain and launch."""
