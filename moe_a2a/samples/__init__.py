"""What demo and bench both run: a text, and small models that read it."""
