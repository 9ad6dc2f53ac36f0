"""The declaration of each training argument: of the newest release, of earlier ones, and ours."""
