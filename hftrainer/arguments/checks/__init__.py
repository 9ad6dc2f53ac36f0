"""Checks the arguments' values, alone, together, and for the device."""
