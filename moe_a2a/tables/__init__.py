"""How many blocks a call uses and which algorithm: measured tables, and models where there is none."""
