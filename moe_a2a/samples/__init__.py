"""What both demo and bench run: a text, and small models that read it."""
