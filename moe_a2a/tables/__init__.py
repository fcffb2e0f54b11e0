"""How many blocks a call uses and which algorithm: tables that were measured, and the models where there is none."""
