"""What a run does, while it does it: speeds, the journal in its folder, its health, and requests to it."""
