"""Differences of earlier releases of `transformers`, and the release that a Trainer follows."""
