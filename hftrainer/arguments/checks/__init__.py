"""What arguments ask for and cannot get: a sentence for each, before anything runs."""
