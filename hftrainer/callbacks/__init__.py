"""The state of a run, the switches of its callbacks, and the callbacks themselves."""
