"""Live monitoring of a run: speeds, the journal in its folder, health, and requests to the run."""
