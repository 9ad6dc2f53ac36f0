"""The state of a run, the control flags of callbacks, and the callbacks themselves."""
