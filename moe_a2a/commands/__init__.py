"""What the commands have in common; the library does not use it."""
