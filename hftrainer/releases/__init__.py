"""What earlier releases of `transformers` do differently, and the release that a Trainer follows."""
